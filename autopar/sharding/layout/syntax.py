"""The layout language as values: what a layout says, statement by statement."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from autopar.mesh import Mesh
from autopar.sharding.layout.source import SourceSpan

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


@dataclass(frozen=True)
class Guard:
    """A contract: this collective does not happen to these tensors over these axes."""

    action: Literal["forbid", "warn"]
    collective: Collective
    scope: Scope
    axes: Axes
    span: SourceSpan | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Limit:
    """`limit memory 70GiB`, `limit memory 90%` of a device, `limit halo 25%` of a shard's extent."""

    quantity: Literal["memory", "halo"]
    size_bytes: int | None = None
    percent: float | None = None
    span: SourceSpan | None = field(default=None, compare=False, repr=False)


Statement = (
    StrategyStatement | MeshStatement | Let | DimRule | Block | Pin | OpPin | GatherStatement | Same | Guard | Limit
)
"""A `DimRule` that stands by itself is a bare rule."""
