"""Read, load and print layouts and strategies. docs/language.md describes the language to users."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from autopar.errors import AutoparError, LayoutError
from autopar.files import data_folder
from autopar.mesh import Mesh, SubMesh
from autopar.sharding.layout.capacity_statement import CapacityStatement
from autopar.sharding.layout.drift import DriftStatement
from autopar.sharding.layout.fold_statement import FoldStatement
from autopar.sharding.layout.parser import LayoutParser
from autopar.sharding.layout.pieces_statement import PiecesStatement
from autopar.sharding.layout.source import SourceSpan, layout_error, read_text, unknown_name
from autopar.sharding.layout.syntax import (
    Axes,
    Block,
    CutStatement,
    DimRule,
    Hole,
    Let,
    Limit,
    MeshStatement,
    MicroBatches,
    NotSplit,
    OpenMicroBatches,
    OpPin,
    OverAxes,
    PartPin,
    Pin,
    PinState,
    PipelineStatement,
    SplitTerm,
    Statement,
    StrategyStatement,
    TensorPattern,
    Term,
    named_axes,
    print_statement,
    rules_of,
)


@dataclass(frozen=True)
class Layout:
    """Statements of a layout in the order of its text; `name` is the file in messages."""

    statements: tuple[Statement, ...]
    name: str = field(default="<layout>", compare=False)

    @staticmethod
    def load(path: str | Path) -> Layout:
        """Read a `.lay` file."""
        return parse_layout(read_text(path), str(path))

    @property
    def strategy(self) -> StrategyStatement | None:
        return next((s for s in self.statements if isinstance(s, StrategyStatement)), None)

    @property
    def mesh(self) -> Mesh | None:
        return next((s.mesh for s in self.statements if isinstance(s, MeshStatement)), None)

    @property
    def micro_batches(self) -> MicroBatches | None:
        return next((s for s in self.statements if isinstance(s, MicroBatches)), None)

    @property
    def open_micro_batches(self) -> OpenMicroBatches | None:
        return next((s for s in self.statements if isinstance(s, OpenMicroBatches)), None)

    def with_micro_batches(self, micro: MicroBatches | OpenMicroBatches | None) -> Layout:
        """Return the layout with other micro-batches, or with none."""
        rest = tuple(one for one in self.statements if not isinstance(one, MicroBatches | OpenMicroBatches))
        return Layout(rest if micro is None else (micro, *rest), self.name)

    def without_pipeline(self) -> Layout:
        """Return the layout without a pipeline."""
        stages = (PipelineStatement, CutStatement, PartPin)
        return Layout(tuple(one for one in self.statements if not isinstance(one, stages)), self.name)

    def without_drift(self) -> Layout:
        """Return the layout of one replica."""
        return Layout(tuple(one for one in self.statements if not isinstance(one, DriftStatement)), self.name)

    def without_time(self) -> Layout:
        """Return the layout without micro-batches and stages."""
        return self.with_micro_batches(None).without_pipeline()

    @property
    def pipeline(self) -> PipelineStatement | None:
        return next((s for s in self.statements if isinstance(s, PipelineStatement)), None)

    @property
    def cut(self) -> CutStatement | None:
        return next((s for s in self.statements if isinstance(s, CutStatement)), None)

    @property
    def drift(self) -> DriftStatement | None:
        return next((s for s in self.statements if isinstance(s, DriftStatement)), None)

    @property
    def fold(self) -> FoldStatement | None:
        return next((s for s in self.statements if isinstance(s, FoldStatement)), None)

    @property
    def pieces(self) -> PiecesStatement | None:
        return next((s for s in self.statements if isinstance(s, PiecesStatement)), None)

    @property
    def capacity(self) -> CapacityStatement | None:
        return next((s for s in self.statements if isinstance(s, CapacityStatement)), None)

    @property
    def part_pins(self) -> tuple[PartPin, ...]:
        return tuple(s for s in self.statements if isinstance(s, PartPin))

    def on_axes(self, meaning: Mapping[str, Axes]) -> Layout:
        """Return the layout with its axes replaced; `()` stands for an axis of size 1."""
        replaced = (replace_axes(statement, meaning) for statement in self.statements)
        found = Layout(tuple(statement for statement in replaced if statement is not None), self.name)
        return found if self.pipeline is None or found.pipeline is not None else found.without_pipeline()

    def __iter__(self) -> Iterator[Statement]:
        return iter(self.statements)

    def __str__(self) -> str:
        return print_layout(self)


def parse_layout(text: str, name: str = "<layout>") -> Layout:
    """Read a layout; messages call it `name`."""
    statements = LayoutParser(text, name).file()
    for one, word in (
        (StrategyStatement, "strategy"),
        (MeshStatement, "mesh"),
        (MicroBatches | OpenMicroBatches, "micro"),
        (PipelineStatement, "pipeline"),
        (CutStatement, "cut"),
        (DriftStatement, "drift"),
        (FoldStatement, "fold"),
        (PiecesStatement, "pieces"),
        (CapacityStatement, "capacity"),
    ):
        found = [statement for statement in statements if isinstance(statement, one)]
        if len(found) > 1:
            message = f"a layout has one '{word}' line, this one has {len(found)}"
            raise layout_error("E0", message, "keep one of them", *(statement.span for statement in found[:2]))
    return Layout(expand_lets(statements), name)


def print_layout(layout: Layout) -> str:
    """Return the layout in its normal form; reading it gives an equal layout."""
    return "".join(f"{print_statement(statement)}\n" for statement in layout.statements)


def parse_rules(text: str, name: str = "<rules>") -> tuple[DimRule, ...]:
    """Read rules alone, `batch -> dp, seq -> tp`."""
    return LayoutParser(text, name).rules()


def parse_memory(text: str) -> Limit:
    """Read a limit of device memory, `70GiB` or `90%`."""
    # The grammar of a `limit` line reads the amount, so that both are written alike.
    why = ""
    try:
        found = parse_layout(f"limit memory {text}", "memory").statements
    except LayoutError as error:
        found, why = (), f": {str(error).splitlines()[0].removeprefix(f'{error.code}: ')}"
    if len(found) != 1 or not isinstance(found[0], Limit):
        why = why or ": expected a size or a share"
        raise AutoparError(f"invalid memory={text!r}{why}\nfix: write it as in '70GiB' or '90%'")
    return found[0]


def parse_strategy_call(text: str) -> tuple[str, dict[str, Axes]]:
    """Read `fsdp(fsdp=dp*tp)`: a strategy, and the mesh axes for each of its axes."""
    return LayoutParser(text, "<strategy>").call()


# -- strategies --------------------------------------------------------------------------------------------------------


def choose_layout(layout: str | Path | Layout, axes: SubMesh) -> Layout:
    """Return the layout that `layout=` names on a mesh with these axes.

    A strategy fits any mesh: its axes that the mesh lacks have size 1, and `fsdp(fsdp=dp*tp)` maps them by hand. If
    strategy and mesh have one axis each, these are mapped whatever their names. No axis in common is an error.
    `micro 8; fsdp` is a strategy in eight micro-batches, `micro 8; pipeline pp 1f1b; fsdp` one in a pipeline too. Such
    a pipeline replaces the one that the strategy names. `drift pod -> mean every 16; fsdp` is one in each replica, and
    `recompute full @blocks.*; regather @*; fsdp` one with less memory.
    """
    if (
        isinstance(layout, str)
        and (match := _STRATEGY_IN_TIME.fullmatch(layout))
        and _names_strategy(match["strategy"])
    ):
        in_time = parse_layout(match["in_time"])
        taken = () if in_time.drift is None else in_time.drift.axes
        taken = taken if in_time.pipeline is None else (*taken, in_time.pipeline.axis)
        rest = SubMesh({axis: size for axis, size in axes.items() if axis not in taken})
        found = choose_layout(match["strategy"].strip(), rest)
        found = found if in_time.pipeline is None else found.without_pipeline()
        found = found if in_time.drift is None else found.without_drift()
        return Layout((*in_time.statements, *found.statements), found.name)
    if isinstance(layout, Layout):
        found = layout
    elif isinstance(layout, Path) or layout.endswith(".lay"):
        found = Layout.load(layout)
    elif _names_strategy(layout):
        name, meaning = parse_strategy_call(layout)
        found = load_strategy(name).on_axes(meaning)
        for axis in (axis for product in meaning.values() for axis in product):
            if axis not in axes:
                raise unknown_name("axis", axis, axes, layout)
    else:
        found = parse_layout(layout)
    if found.strategy is None:
        return found
    own = axes_of(found)
    absent = {axis: () for axis in own if axis not in axes}
    longer = [axis for axis, size in axes.items() if size > 1]
    if len(absent) == len(own) > 0 and longer:
        if len(own) > 1 or len(longer) > 1:
            name = found.strategy.name
            ways = " or ".join(f'layout="{name}({axis}={"*".join(longer)})"' for axis in own)
            raise LayoutError(
                "E1",
                f"E1: strategy '{name}' splits nothing on a mesh of {', '.join(longer)}: "
                f"its axes are {', '.join(own)}\nfix: {ways}, or a mesh whose axes have these names",
            )
        return found.on_axes({own[0]: (longer[0],)})
    return found.on_axes(absent)


# `micro 8; pipeline pp 1f1b; fsdp(fsdp=dp)`. The statement names an axis on its line, the strategy `pipeline` does not.
_STRATEGY_IN_TIME = re.compile(
    r"(?P<in_time>(\s*(micro[ \t]+[\d?]|(pipeline|cut|drift|fold|pieces|capacity|recompute)[ \t]+\w|"
    r"(keep|regather)[ \t]+@|op[ \t]+@\S+[ \t]+at\s)[^;\n]*[;\n])+)"
    r"(?P<strategy>[^;]+);?\s*"
)


def _names_strategy(text: str) -> bool:
    """Return whether a text names a strategy, with or without arguments, and is no layout."""
    name = text.partition("(")[0].strip()
    # An unknown identifier counts too: the error then lists the strategies.
    return name in strategy_names() or (name.isidentifier() and "->" not in text and ":" not in text)


def dims_of_axes(layout: Layout) -> dict[str, frozenset[str]]:
    """Return, by axis of a layout, the dims or patterns of dims that no other axis splits.

    Dims that several axes split, as the batch, do not tell these axes apart.
    """
    found: dict[str, set[str]] = {axis: set() for axis in axes_of(layout)}
    for statement in layout:
        for rule in rules_of(statement):
            for term in rule.place.terms:
                for axis in term.axes if isinstance(term, SplitTerm) else ():
                    found[axis].update(rule.dims)
    return {
        axis: frozenset(dims.difference(*(other for name, other in found.items() if name != axis)))
        for axis, dims in found.items()
    }


def usable_axes(layout: Layout, dims: Iterable[str]) -> tuple[str, ...]:
    """Return the axes of a strategy that a model can use: not `ep` without experts."""
    known = tuple(dims)
    return tuple(
        axis
        for axis, patterns in dims_of_axes(layout).items()
        if not patterns or any(fnmatchcase(dim, pattern) for pattern in patterns for dim in known)
    )


def applies_to(layout: Layout, dims: Iterable[str]) -> bool:
    """Return whether a model has the dims of a strategy, as experts for `gshard_moe`."""
    special = {axis for axis, patterns in dims_of_axes(layout).items() if patterns}
    return not special or not special.isdisjoint(usable_axes(layout, dims))


def roles_of(layout: Layout, dims: Iterable[str]) -> tuple[str, ...]:
    """Return the usable axes of a strategy, and "" for an idle axis if it has one."""
    usable = usable_axes(layout, dims)
    return (*usable, "") if usable and len(axes_of(layout)) == 1 else usable


def axes_of(layout: Layout) -> tuple[str, ...]:
    """Return all mesh axes that a layout names: those of replicas and stages first, then those of the rules."""
    first = () if layout.drift is None else layout.drift.axes
    stages = () if layout.pipeline is None else (layout.pipeline.axis,)
    return tuple(dict.fromkeys((*first, *stages, *(axis for statement in layout for axis, _ in named_axes(statement)))))


def strategy_names() -> tuple[str, ...]:
    """Return the names of all strategies, in alphabetical order."""
    return tuple(sorted(path.stem for path in data_folder("strategies").glob("*.lay")))


def strategy_path(name: str) -> Path:
    """Return the file of a strategy."""
    known = strategy_names()
    if name not in known:
        raise unknown_name("strategy", name, known)
    return data_folder("strategies") / f"{name}.lay"


def load_strategy(name: str) -> Layout:
    """Return a strategy as a layout, on its own axes; `on_axes` puts it on those of a mesh."""
    return Layout.load(strategy_path(name))


# -- substitution of axes ----------------------------------------------------------------------------------------------


def expand_lets(statements: Sequence[Statement]) -> tuple[Statement, ...]:
    """Return the statements with every `let` name replaced by its axes; the `let` lines stay."""
    lets = _lets(statements)
    users = {name: set(lets).intersection(let.axes) for name, let in lets.items()}
    try:
        order = tuple(TopologicalSorter(users).static_order())
    except CycleError as error:
        cycle = [lets[name] for name in dict.fromkeys(error.args[1])]
        message = "these names stand for one another" if len(cycle) > 1 else f"'{cycle[0].name}' stands for itself"
        raise layout_error(
            "E0", message, "define one of them by axes of the mesh", *(let.span for let in cycle)
        ) from error
    # In the order of definition by others, so that each name is replaced by axes at once.
    meaning: dict[str, Axes] = {}
    for name in order:
        meaning[name] = _replaced(lets[name].axes, meaning, lets[name].span)
    return tuple(kept for kept in (replace_axes(statement, meaning) for statement in statements) if kept is not None)


def replace_axes(statement: Statement, meaning: Mapping[str, Axes]) -> Statement | None:
    """Return the statement with other axes, or None if nothing is left of it.

    Without their axes `tp` is `none`, `tp?` is `?`, and guards, pinned states and stages are gone.
    """
    match statement:
        case PipelineStatement(axis=axis, span=span) | CutStatement(axis=axis, span=span):
            own = _replaced((axis,), meaning, span)
            if len(own) > 1:
                message = f"the stages of a pipeline lie along one axis, and '{axis}' stands for {'*'.join(own)}"
                raise layout_error("E3", message, "name one axis of the mesh", span)
            return replace(statement, axis=own[0]) if own else None
        case DimRule():
            return _rule(statement, meaning)
        case Block(rules=rules):
            return replace(statement, rules=tuple(_rule(rule, meaning) for rule in rules))
        case Pin(rules=rules, states=states, span=span):
            moved = [PinState(state.state, _replaced(state.axes, meaning, span)) for state in states]
            kept = tuple(state for state in moved if state.axes)
            return replace(statement, rules=tuple(_rule(rule, meaning) for rule in rules), states=kept)
        case OpPin(choice=choice, span=span):
            chosen = [(factor, _replaced(axes, meaning, span)) for factor, axes in choice]
            split = tuple((factor, axes) for factor, axes in chosen if axes)
            return replace(statement, choice=split) if split else None
    if isinstance(statement, OverAxes):
        over = _replaced(statement.axes, meaning, statement.span)
        return replace(statement, axes=over) if over else None
    return statement


def _lets(statements: Sequence[Statement]) -> dict[str, Let]:
    lets: dict[str, Let] = {}
    for let in (statement for statement in statements if isinstance(statement, Let)):
        if let.name in lets:
            raise layout_error(
                "E0", f"'{let.name}' is defined twice", "remove one of the lines", lets[let.name].span, let.span
            )
        lets[let.name] = let
    for mesh in (statement for statement in statements if isinstance(statement, MeshStatement)):
        for name in mesh.mesh.names:
            if name in lets:
                message = f"'{name}' is both an axis of the mesh and a name for axes"
                raise layout_error("E0", message, "give the 'let' another name", mesh.span, lets[name].span)
    return lets


def _rule(rule: DimRule, meaning: Mapping[str, Axes]) -> DimRule:
    # Alternatives that differ in absent axes only become equal.
    terms = dict.fromkeys(_term(term, meaning, rule.span) for term in rule.place.terms)
    return replace(rule, place=TensorPattern(tuple(terms), rule.place.priority))


def _term(term: Term, meaning: Mapping[str, Axes], span: SourceSpan | None) -> Term:
    match term:
        case Hole(candidates=candidates) if candidates:
            axes = dict.fromkeys(_replaced(candidate, meaning, span) for candidate in candidates)
            left = tuple(candidate for candidate in axes if candidate)
            return Hole(left) if left else NotSplit()
        case SplitTerm(axes=axes, extends=extends):
            replaced = _replaced(axes, meaning, span)
            if not replaced:
                return Hole() if extends else NotSplit()
            return replace(term, axes=replaced)
    return term


def _replaced(axes: Axes, meaning: Mapping[str, Axes], span: SourceSpan | None) -> Axes:
    replaced = tuple(axis for name in axes for axis in meaning.get(name, (name,)))
    for axis in replaced:
        if replaced.count(axis) > 1:
            written = "*".join(axes)
            message = f"axis '{axis}' stands twice in '{written}', which is {'*'.join(replaced)}"
            raise layout_error("E0", message, "name it once", span.at(axes[0]) if span else f"{written}")
    return replaced
