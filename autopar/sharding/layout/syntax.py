"""Statements of the layout language as frozen values, and their text in normal form.

The normal form has one statement a line and `->` for arrows; a long block has one rule a line.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, get_args

from autopar.mesh import Mesh
from autopar.sharding.layout.capacity_statement import CapacityStatement, print_capacity
from autopar.sharding.layout.drift import DriftStatement, print_drift
from autopar.sharding.layout.fold_statement import FoldStatement, print_fold
from autopar.sharding.layout.pieces_statement import PiecesStatement, print_pieces
from autopar.sharding.layout.recompute_ops import RecomputeList
from autopar.sharding.layout.source import SourceSpan
from autopar.sharding.layout.tokens import format_percent, format_size
from autopar.sharding.schedules import Schedule

# A product of mesh axes, major to minor.
Axes = tuple[str, ...]

Kind = Literal["param", "use", "grad", "opt", "act", "input", "output", "buffer"]
KINDS: tuple[Kind, ...] = get_args(Kind)

Collective = Literal["all_gather", "all_reduce", "all_to_all", "halo_exchange", "reduce_scatter", "ring_pass"]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)


# Ops of a layer that the backward recomputes: none, the cheap ones, or all. With `offload` none: what they
# save goes to the host. A list names the ops themselves.
RecomputeMode = Literal["none", "selective", "full", "offload"]
Recompute = RecomputeMode | RecomputeList


@dataclass(frozen=True)
class NotSplit:
    """`none`."""


@dataclass(frozen=True)
class Hole:
    """`?`, or `?{tp, dp*tp}`: a split that the solver picks, from the candidates if there are any."""

    candidates: tuple[Axes, ...] = ()


@dataclass(frozen=True)
class SplitTerm:
    """`dp*tp`: a split over these axes; `tp?`: over these and perhaps more; `tp pad`: in uneven shards too.

    `pod by 12:4` splits in unequal shards of these proportions, `pod by speed` in those of the devices' speeds.
    """

    axes: Axes
    extends: bool = False
    pad: bool = False
    by: tuple[int, ...] | Literal["speed"] | None = None


Term = NotSplit | Hole | SplitTerm


@dataclass(frozen=True)
class TensorPattern:
    """Alternatives for a dim, best first; the dim of the lower priority number claims a contested axis."""

    terms: tuple[Term, ...]
    priority: int = 0


@dataclass(frozen=True)
class DimRule:
    """`(heads, d_*) -> tp | none`: dims, or patterns of dims, with their alternatives."""

    dims: tuple[str, ...]
    place: TensorPattern
    # Places do not count in comparisons: a layout equals its text, printed and read again.
    span: SourceSpan | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Scope:
    """`act[seq, d_ff]@blocks.0.*`: tensors of a kind that have these dims and whose name matches."""

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
    """`let data = dp*fsdp`: a name for axes; the parser replaces it in all other statements."""

    name: str
    axes: Axes
    span: SourceSpan | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Block:
    """`param, grad { d_ff -> tp }`: rules for the tensors of some scopes."""

    scopes: tuple[Scope, ...]
    rules: tuple[DimRule, ...]
    span: SourceSpan | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class PinState:
    """`+ partial(tp)`: state of a pinned tensor along axes that split none of its dims."""

    state: Literal["partial", "broadcast"]
    axes: Axes


@dataclass(frozen=True)
class Pin:
    """`@blocks.0.weight[d_ff -> tp]`: rules for the tensors of one name."""

    glob: str
    rules: tuple[DimRule, ...]
    states: tuple[PinState, ...] = ()
    span: SourceSpan | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class OpPin:
    """`op @name[n -> tp]`: the choice of an op, as axes by factor.

    `n.1` is the second atom of a factor. Axes that split nothing stand under `none` if the op does not use them, under
    `broadcast` or `partial.0` if they pass through it. `partial.0` is the first group of operands in which the rule is
    linear.
    """

    glob: str
    choice: tuple[tuple[str, Axes], ...]
    span: SourceSpan | None = field(default=None, compare=False, repr=False)
    uneven: tuple[str, ...] = ()  # factors that may be cut in pieces of different lengths, `n -> tp pad`


@dataclass(frozen=True)
class GatherStatement:
    """`keep @name`, `regather @name` of a parameter; `recompute full @name` of a layer."""

    action: Literal["keep", "regather", "recompute"]
    glob: str
    level: Recompute | None = None
    span: SourceSpan | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Same:
    """`same @left @right`: the tensors of both names share one sharding."""

    left: str
    right: str
    span: SourceSpan | None = field(default=None, compare=False, repr=False)

    @property
    def kind(self) -> str:
        return "same"


@dataclass(frozen=True)
class MicroBatches:
    """`micro 8`: the batch of a call runs as eight micro-batches, one after the other; `micro 8 of images`.

    `micro 8 halves` runs each as two halves side by side: what one half sends is on its way while the other computes.
    """

    count: int
    dim: str = "batch"
    halves: bool = False
    span: SourceSpan | None = field(default=None, compare=False, repr=False)

    @property
    def parts(self) -> int:
        """Return the number of parts of the batch that run the graph of the model."""
        return 2 * self.count if self.halves else self.count


@dataclass(frozen=True)
class OpenMicroBatches:
    """`micro ?`: the search chooses the number of micro-batches, `micro ?{8, 16}` one of these."""

    candidates: tuple[int, ...] = ()
    dim: str = "batch"
    halves: bool = False
    span: SourceSpan | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class PipelineStatement:
    """`pipeline pp 1f1b`: the ranks along an axis are stages, each with a part of the model.

    `interleaved(2)` has two parts on each stage, `1f1b(+1)` one micro-batch more in flight, `zero_bubble` puts off the
    gradients of weights. `pipeline pp ?` leaves the schedule to the search, which begins with that of the statement.
    """

    axis: str
    schedule: Schedule
    chunks: int = 1
    more: int = 0
    is_open: bool = False
    span: SourceSpan | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class CutStatement:
    """`cut pp before @blocks.2, @blocks.4`: modules or ops that begin the second and later parts of a pipeline.

    `cut pp ?` names none: the parts take about equal time, as they do without the statement.
    """

    axis: str
    before: tuple[str, ...]
    span: SourceSpan | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class PartPin:
    """`op @vision.* at part 0`: ops that stand in another part of a pipeline than the cuts say."""

    glob: str
    part: int
    span: SourceSpan | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Guard:
    """`forbid all_gather(act) over tp`: these tensors need no such collective over these axes."""

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


# Statements that are checked on every plan; reports name them by `kind`.
Contract = Guard | Same | Limit

# Statements with one product of mesh axes in `axes`: `let` names and strategy axes are substituted there.
OverAxes = Let | Guard | DriftStatement

# A `DimRule` that stands by itself is a bare rule.
Statement = (
    StrategyStatement
    | MeshStatement
    | MicroBatches
    | OpenMicroBatches
    | PipelineStatement
    | CutStatement
    | PartPin
    | FoldStatement
    | PiecesStatement
    | CapacityStatement
    | OverAxes
    | DimRule
    | Block
    | Pin
    | OpPin
    | GatherStatement
    | Contract
)


def tensor_globs(statement: Statement) -> tuple[str, ...]:
    """Return the patterns of a statement that must match the name of a tensor of any kind."""
    match statement:
        case Pin(glob=glob) | GatherStatement(action="keep" | "regather", glob=glob):
            return (glob,)
        case Same(left=left, right=right):
            return left, right
    return ()


def rules_of(statement: Statement) -> tuple[DimRule, ...]:
    """Return the rules in a statement."""
    if isinstance(statement, DimRule):
        return (statement,)
    return statement.rules if isinstance(statement, Block | Pin) else ()


def named_axes(statement: Statement) -> Iterator[tuple[str, SourceSpan | None]]:
    """Yield the mesh axes that a statement names, each with its place."""
    for rule in rules_of(statement):
        for term in rule.place.terms:
            if isinstance(term, SplitTerm):
                yield from ((axis, rule.span) for axis in term.axes)
            elif isinstance(term, Hole):
                yield from ((axis, rule.span) for candidate in term.candidates for axis in candidate)
    if isinstance(statement, Pin):
        yield from ((axis, statement.span) for state in statement.states for axis in state.axes)
    elif isinstance(statement, OpPin):
        yield from ((axis, statement.span) for _, axes in statement.choice for axis in axes)
    elif isinstance(statement, OverAxes):
        yield from ((axis, statement.span) for axis in statement.axes)


# -- text -------------------------------------------------------------------------------------------------------------

# Characters of a line; a longer block has one rule a line.
WIDTH = 120


def schedule_text(schedule: Schedule, chunks: int, more: int) -> str:
    """Return a schedule as a layout writes it: `1f1b(+1)`, `interleaved(2)`."""
    return schedule + (f"({chunks})" if schedule == "interleaved" else f"(+{more})" if more else "")


def print_statement(statement: Statement) -> str:
    """Return the text of a statement, without the end of its line."""
    match statement:
        case StrategyStatement(name, description):
            escaped = (description or "").replace("\\", "\\\\").replace('"', '\\"')
            return f"strategy {name}" + ("" if description is None else f' "{escaped}"')
        case MeshStatement(mesh):
            return f"mesh {', '.join(map(str, mesh.declared))}"
        case MicroBatches(count, dim, halves):
            return f"micro {count}" + ("" if dim == "batch" else f" of {dim}") + (" halves" if halves else "")
        case OpenMicroBatches(candidates, dim, halves):
            among = f"{{{', '.join(map(str, candidates))}}}" if candidates else ""
            return f"micro ?{among}" + ("" if dim == "batch" else f" of {dim}") + (" halves" if halves else "")
        case PipelineStatement(axis, is_open=True):
            return f"pipeline {axis} ?"
        case CutStatement(axis, ()):
            return f"cut {axis} ?"
        case PipelineStatement(axis, schedule, chunks, more):
            return f"pipeline {axis} {schedule_text(schedule, chunks, more)}"
        case CutStatement(axis, before):
            return f"cut {axis} before {', '.join(f'@{name}' for name in before)}"
        case PartPin(glob, part):
            return f"op @{glob} at part {part}"
        case FoldStatement():
            return print_fold(statement)
        case PiecesStatement():
            return print_pieces(statement)
        case CapacityStatement():
            return print_capacity(statement)
        case DriftStatement():
            return print_drift(statement)
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
            pads = dict.fromkeys(uneven, " pad")
            factors = [f"{factor} -> {print_axes(axes)}{pads.get(factor, '')}" for factor, axes in choice]
            return f"op @{glob}[{', '.join(factors)}]"
        case GatherStatement(action, glob, level):
            return f"{action} {level} @{glob}" if level else f"{action} @{glob}"
        case Same(left, right):
            return f"same @{left} @{right}"
        case Guard(action, collective, scope, axes):
            return f"{action} {collective}({print_scope(scope)}) over {print_axes(axes)}"
        case Limit(quantity, size_bytes, percent):
            assert size_bytes is not None or percent is not None, "a limit is a size or a percentage"
            return f"limit {quantity} {format_percent(percent or 0) if size_bytes is None else format_size(size_bytes)}"


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


def _term(term: Term) -> str:
    if isinstance(term, NotSplit):
        return "none"
    if isinstance(term, Hole):
        return f"?{{{', '.join(map(print_axes, term.candidates))}}}" if term.candidates else "?"
    by = "" if term.by is None else f" by {term.by if term.by == 'speed' else ':'.join(map(str, term.by))}"
    return print_axes(term.axes) + ("?" if term.extends else "") + (" pad" if term.pad else "") + by


def _block(block: Block) -> str:
    scopes = ", ".join(map(print_scope, block.scopes))
    rules = [_rule(rule) for rule in block.rules]
    line = f"{scopes} {{ {', '.join(rules)} }}"
    return line if len(line) <= WIDTH else "\n".join([f"{scopes} {{", *(f"  {rule}" for rule in rules), "}"])
