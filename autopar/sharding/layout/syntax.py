"""Statements of the layout language as frozen values, and their text in normal form.

The normal form has one statement a line and `->` for arrows; a long block has one rule a line.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from autopar.mesh import Mesh
from autopar.sharding.layout.source import SourceSpan
from autopar.sharding.layout.tokens import format_percent, format_size

Axes = tuple[str, ...]
"""A product of mesh axes, major to minor."""

Kind = Literal["param", "use", "grad", "opt", "act", "input", "output", "buffer"]
KINDS: tuple[Kind, ...] = get_args(Kind)

Collective = Literal["all_gather", "all_reduce", "all_to_all", "halo_exchange", "reduce_scatter"]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)


@dataclass(frozen=True)
class NotSplit:
    """`none`."""


@dataclass(frozen=True)
class Hole:
    """`?`, or `?{tp, dp*tp}`: left to the solver, among the candidates if there are any."""

    candidates: tuple[Axes, ...] = ()


@dataclass(frozen=True)
class SplitTerm:
    """`dp*tp`: split over these axes; `tp?`: over these and perhaps more; `tp pad`: uneven shards are fine."""

    axes: Axes
    extends: bool = False
    pad: bool = False


Term = NotSplit | Hole | SplitTerm


@dataclass(frozen=True)
class TensorPattern:
    """The alternatives for a dim, best first; of two dims that want one axis the lower priority claims it."""

    terms: tuple[Term, ...]
    priority: int = 0


@dataclass(frozen=True)
class DimRule:
    """`(heads, d_*) -> tp | none`: dims, or patterns of dims, and where they go."""

    dims: tuple[str, ...]
    place: TensorPattern
    span: SourceSpan | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Scope:
    """`act[seq, d_ff]@blocks.0.*`: tensors of a kind, that have these dims, whose name matches."""

    kind: Kind | None = None
    dims: tuple[str, ...] = ()
    glob: str | None = None


@dataclass(frozen=True)
class StrategyStatement:
    name: str
    description: str | None = None
    span: SourceSpan | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class MeshStatement:
    mesh: Mesh
    span: SourceSpan | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Let:
    """A name for axes. What other statements say with it is already said in axes here."""

    name: str
    axes: Axes
    span: SourceSpan | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Block:
    """Rules for the tensors of some scopes."""

    scopes: tuple[Scope, ...]
    rules: tuple[DimRule, ...]
    span: SourceSpan | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class PinState:
    """`+ partial(tp)`: what axes that split no dim do to a pinned tensor."""

    state: Literal["partial", "broadcast"]
    axes: Axes


@dataclass(frozen=True)
class Pin:
    """Rules for the tensors of one name."""

    glob: str
    rules: tuple[DimRule, ...]
    states: tuple[PinState, ...] = ()
    span: SourceSpan | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class OpPin:
    """The choice of an op: factor -> axes.

    `n.1` is the second of the dims that a factor is made of. Axes that split nothing: `none` if the op does not use
    them, `broadcast` or `partial.0` (the first of the operands in which its rule is linear) if they pass through it.
    """

    glob: str
    choice: tuple[tuple[str, Axes], ...]
    span: SourceSpan | None = field(default=None, compare=False, repr=False)
    uneven: tuple[str, ...] = ()
    """The factors that may be cut in pieces of different lengths."""


@dataclass(frozen=True)
class GatherStatement:
    """What lives until the backward. Only `recompute` has a level."""

    action: Literal["keep", "regather", "recompute"]
    glob: str
    level: Literal["none", "selective", "full"] | None = None
    span: SourceSpan | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Same:
    """The tensors of both names share one layout."""

    left: str
    right: str
    span: SourceSpan | None = field(default=None, compare=False, repr=False)

    @property
    def kind(self) -> str:
        return "same"


@dataclass(frozen=True)
class Guard:
    """A contract: this collective does not happen to these tensors over these axes."""

    action: Literal["forbid", "warn"]
    collective: Collective
    scope: Scope
    axes: Axes
    span: SourceSpan | None = field(default=None, compare=False, repr=False)

    @property
    def kind(self) -> str:
        return self.action


@dataclass(frozen=True)
class Limit:
    """`limit memory 70GiB`, `limit memory 90%` of a device, `limit halo 25%` of a shard's extent."""

    quantity: Literal["memory", "halo"]
    size_bytes: int | None = None
    percent: float | None = None
    span: SourceSpan | None = field(default=None, compare=False, repr=False)

    @property
    def kind(self) -> str:
        return self.quantity


# Checked on every plan; `kind` is the word for one in reports.
Contract = Guard | Same | Limit

# Statements with one product of mesh axes in `axes`: `let` names and strategy axes are substituted there.
OverAxes = Let | Guard

# A `DimRule` that stands by itself is a bare rule.
Statement = StrategyStatement | MeshStatement | OverAxes | DimRule | Block | Pin | OpPin | GatherStatement | Contract


def tensor_globs(statement: Statement) -> tuple[str, ...]:
    """Return the patterns of a statement that must match the name of a tensor of any kind."""
    match statement:
        case Pin(glob=glob) | GatherStatement(action="keep" | "regather", glob=glob):
            return (glob,)
        case Same(left=left, right=right):
            return left, right
    return ()


# -- text -------------------------------------------------------------------------------------------------------------

WIDTH = 120


def print_statement(statement: Statement) -> str:
    """One statement, without the end of its line."""
    match statement:
        case StrategyStatement(name, description):
            return f"strategy {name}" + ("" if description is None else f" {_quoted(description)}")
        case MeshStatement(mesh):
            return f"mesh {', '.join(map(str, mesh.declared))}"
        case Let(name, axes):
            return f"let {name} = {print_axes(axes)}"
        case DimRule():
            return _rule(statement)
        case Block():
            return _block(statement)
        case Pin(glob, rules, states):
            added = "".join(f" + {state.state}({print_axes(state.axes)})" for state in states)
            return f"@{glob}[{', '.join(map(_rule, rules))}]{added}"
        case OpPin(glob, choice, uneven=uneven):
            return f"op @{glob}[{', '.join(_factor(*one, one[0] in uneven) for one in choice)}]"
        case GatherStatement(action, glob, level):
            return f"{action} {level} @{glob}" if level else f"{action} @{glob}"
        case Same(left, right):
            return f"same @{left} @{right}"
        case Guard(action, collective, scope, axes):
            return f"{action} {collective}({print_scope(scope)}) over {print_axes(axes)}"
        case Limit():
            return f"limit {statement.quantity} {_amount(statement)}"


def print_axes(axes: Axes) -> str:
    return "*".join(axes)


def print_place(place: TensorPattern) -> str:
    terms = " | ".join(map(_term, place.terms))
    return f"{terms} !{place.priority}" if place.priority else terms


def print_scope(scope: Scope) -> str:
    dims = f"[{', '.join(scope.dims)}]" if scope.dims else ""
    return f"{scope.kind or ''}{dims}" + ("" if scope.glob is None else f"@{scope.glob}")


def _rule(rule: DimRule) -> str:
    dims = rule.dims[0] if len(rule.dims) == 1 else f"({', '.join(rule.dims)})"
    return f"{dims} -> {print_place(rule.place)}"


def _factor(factor: str, axes: Axes, uneven: bool) -> str:
    return f"{factor} -> {print_axes(axes)}" + (" pad" if uneven else "")


def _term(term: Term) -> str:
    if isinstance(term, NotSplit):
        return "none"
    if isinstance(term, Hole):
        return f"?{{{', '.join(map(print_axes, term.candidates))}}}" if term.candidates else "?"
    return print_axes(term.axes) + ("?" if term.extends else "") + (" pad" if term.pad else "")


def _block(block: Block) -> str:
    scopes = ", ".join(map(print_scope, block.scopes))
    rules = [_rule(rule) for rule in block.rules]
    line = f"{scopes} {{ {', '.join(rules)} }}"
    return line if len(line) <= WIDTH else "\n".join([f"{scopes} {{", *(f"  {rule}" for rule in rules), "}"])


def _amount(limit: Limit) -> str:
    if limit.size_bytes is not None:
        return format_size(limit.size_bytes)
    assert limit.percent is not None, "a limit is a size or a percentage"
    return format_percent(limit.percent)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
