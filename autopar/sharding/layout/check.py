"""Check a layout against a model and a mesh: all its names are known, and no statement would be ignored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autopar.errors import LayoutError
from autopar.mesh import SubMesh
from autopar.sharding.layout.drift import DriftStatement
from autopar.sharding.layout.language import Layout
from autopar.sharding.layout.matching import POSITION, glob_matches, matches
from autopar.sharding.layout.recompute_ops import RecomputeList
from autopar.sharding.layout.source import SourceSpan, layout_error, unknown_name
from autopar.sharding.layout.syntax import (
    Block,
    DimRule,
    GatherStatement,
    Guard,
    Let,
    MeshStatement,
    MicroBatches,
    OpenMicroBatches,
    OpPin,
    Pin,
    SplitTerm,
    Statement,
    named_axes,
    rules_of,
    tensor_globs,
)
from autopar.sharding.sharding import without_time


@dataclass(frozen=True)
class LayoutWords:
    """Names of a model that a layout may use."""

    dims: frozenset[str]
    # The names of its tensors by kind; a value that the model returns is an `output` and no `act`.
    tensors: Mapping[str, frozenset[str]]
    # Its ops and the factors of the rule of each.
    ops: Mapping[str, tuple[str, ...]]
    # The module paths of its layers.
    layers: tuple[str, ...] = ()
    # Words for ops of these layers in lists of what to recompute.
    op_words: frozenset[str] = frozenset()

    def of_kind(self, kind: str | None) -> frozenset[str]:
        """Return the tensors that a scope of this kind may cover."""
        if kind is None:
            return frozenset().union(*self.tensors.values())
        return self.tensors.get("param" if kind in ("use", "grad", "opt") else kind, frozenset())


def check_layout(layout: Layout, words: LayoutWords, axes: SubMesh) -> None:
    """Raise for the first statement with an unknown name or a request without effect.

    A strategy may name dims that the model lacks: its rules about them are skipped.
    """
    for statement in layout:
        _check_mesh(statement, layout, axes)
        _check_names(statement, words, axes, any_dims=layout.strategy is not None)
        unsupported = _unsupported(statement, words)
        if unsupported is not None:
            raise unsupported


def _check_mesh(statement: Statement, layout: Layout, axes: SubMesh) -> None:
    if not isinstance(statement, MeshStatement):
        return
    # The axis of stages splits no tensor, and time is no axis of a mesh.
    stages = None if layout.pipeline is None else layout.pipeline.axis
    written = {axis: size for axis, size in statement.mesh.axes.items() if axis != stages}
    axes = without_time(axes)
    # A size that the layout leaves out, `mesh dp, tp=8`, fits any mesh.
    fits = tuple(written) == tuple(axes) and all(size in (None, axes[axis]) for axis, size in written.items())
    if not fits:
        given = ", ".join(f"{axis}={size}" for axis, size in axes.items())
        raise layout_error(
            "E1",
            f"the layout is for another mesh than the one it is to run on, {given}",
            f"write 'mesh {given}', or leave the line out",
            statement.span,
        )


def _check_names(statement: Statement, words: LayoutWords, axes: SubMesh, any_dims: bool) -> None:
    span: SourceSpan | None = getattr(statement, "span", None)
    for rule in rules_of(statement):
        for pattern in () if any_dims else rule.dims:
            # The position of an atom says nothing without a tensor, so it is allowed in scopes and pins only.
            if pattern.startswith(POSITION) and isinstance(statement, Block | Pin):
                continue
            if not any(matches(pattern, dim) for dim in words.dims):
                raise unknown_name("dim", pattern, words.dims, _at(rule.span, pattern))
    if isinstance(statement, MicroBatches | OpenMicroBatches) and statement.dim not in words.dims:
        raise unknown_name("dim", statement.dim, words.dims, _at(span, statement.dim))
    # A `let` is checked where its name is used.
    for name, place in () if isinstance(statement, Let) else named_axes(statement):
        if name not in axes:
            raise unknown_name("axis", name, without_time(axes), _at(place, name))
    guarded = (statement.scope,) if isinstance(statement, Guard) else ()
    for scope in statement.scopes if isinstance(statement, Block) else guarded:
        for dim in () if any_dims else scope.dims:
            if dim not in words.dims:
                raise unknown_name("dim", dim, words.dims, _at(span, dim))
        if scope.glob is not None:
            what = "tensor" if scope.kind is None else f"tensor of the kind {scope.kind}"
            _check_glob(what, scope.glob, words.of_kind(scope.kind), span)
    for glob in tensor_globs(statement):
        _check_glob("tensor", glob, words.of_kind(None), span)
    if isinstance(statement, GatherStatement) and statement.action == "recompute":
        _check_glob("layer", statement.glob, words.layers, span)
        for item in statement.level.items if isinstance(statement.level, RecomputeList) else ():
            if item.is_glob:
                _check_glob("op", item.pattern, words.ops, item.span)
            elif item.pattern not in words.op_words:
                raise unknown_name("op of layers", item.pattern, words.op_words, item.span)
    elif isinstance(statement, OpPin):
        _check_glob("op", statement.glob, words.ops, span)
        for op in (op for op in words.ops if glob_matches(statement.glob, op)):
            for factor, _ in statement.choice:
                name, _, number = factor.partition(".")
                passes = factor in ("none", "broadcast") or (name == "partial" and number.isdigit())
                if not passes and name not in words.ops[op]:
                    raise unknown_name(f"factor of {op}", factor, words.ops[op], _at(span, factor))


def _check_glob(what: str, glob: str, known: Iterable[str], span: SourceSpan | None) -> None:
    names = list(known)
    if not any(glob_matches(glob, name) for name in names):
        raise unknown_name(what, glob, names, span)


def _at(span: SourceSpan | None, word: str) -> SourceSpan | None:
    return None if span is None else span.at(word)


def _unsupported(statement: Statement, words: LayoutWords) -> LayoutError | None:
    """Return the error for a statement of the language that autopar cannot run."""
    match statement:
        case DriftStatement(span=span):
            return layout_error(
                "E0", "replicas that drift are split off before a layout is completed", "plan one of them", span
            )
        case GatherStatement(action="regather", glob=glob, span=span):
            if not any(glob_matches(glob, name) for name in words.of_kind("param")):
                message = f"'{glob}' is no parameter, and only parameters are gathered again"
                return layout_error("E0", message, "name those", span)
        case Block(scopes=scopes, rules=rules, span=span) if any(scope.kind == "buffer" for scope in scopes):
            if _splits(rules):
                return layout_error(
                    "E0", "buffers are stored whole on every rank", "write 'buffer { * -> none }'", span
                )
        case Pin(glob=glob, rules=rules, span=span) if _splits(rules):
            held = [name for name in words.of_kind("buffer") if glob_matches(glob, name)]
            if held:
                message = f"{held[0]} is a buffer, and buffers are stored whole on every rank"
                return layout_error("E0", message, "pin it to 'none'", span)
    return None


def _splits(rules: Iterable[DimRule]) -> bool:
    return any(isinstance(term, SplitTerm) for rule in rules for term in rule.place.terms)
