"""Layout to layout: the steps that turn one into the other, forward and backward, and what each of them sends.

Seen as values, a tensor is along each axis either the same on every rank (R and B), in pieces (S), or a sum (P). One
table serves both directions, because a gradient is a tensor with a layout of its own (`Sharding.gradient`):

    same  -> sum    keep_one         the first rank keeps the value, the others hold zeros
    sum   -> same   all_reduce
    sum   -> piece  reduce_scatter
    piece -> same   all_gather
    same  -> piece  slice
    piece -> piece  all_to_all       another dim, or the same dim with its axes in another order
    piece -> sum    pad              with zeros, to the full extent

So R -> B sends nothing forward, and its backward, which takes a sum to one value, is an all-reduce. The two directions
are planned one by one: the backward of S -> R is a slice, whichever way the forward took.

The steps of a direction are the cheapest over all orders: a shortest path, whose nodes are layouts, whose edges are
steps, over one axis or over several at once. Only axes that the two layouts treat differently take part, so the
communication stays on the axes that the user sees change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.mesh import SubMesh
from autopar.sharding.atoms import Atoms
from autopar.sharding.reshard.shortest_path import cheapest
from autopar.sharding.reshard.steps import LOCAL, LinkCost, Step, StepKind
from autopar.sharding.sharding import Sharding

__all__ = ["LOCAL", "LinkCost", "Reshard", "Step", "StepKind", "reshard", "steps"]


@dataclass(frozen=True)
class Reshard:
    """A conversion with both its directions; `gradient` is the conversion that its backward makes."""

    atoms: Atoms
    axes: SubMesh
    source: Sharding
    target: Sharding
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]

    @property
    def gradient(self) -> Reshard:
        return Reshard(self.atoms, self.axes, self.target.gradient, self.source.gradient, self.backward, self.forward)

    def __str__(self) -> str:
        ways = [", ".join(map(str, way)) or "nothing" for way in (self.forward, self.backward)]
        return f"{self.source} -> {self.target}: forward {ways[0]}; backward {ways[1]}"


def reshard(
    atoms: Atoms,
    source: Sharding,
    target: Sharding,
    axes: SubMesh,
    links: Mapping[str, LinkCost] | None = None,
) -> Reshard:
    """The cheapest steps from one layout to another and, for the gradient, back."""
    return Reshard(
        atoms,
        SubMesh.of(axes),
        source,
        target,
        steps(atoms, source, target, axes, links),
        steps(atoms, target.gradient, source.gradient, axes, links),
    )


def steps(
    atoms: Atoms,
    source: Sharding,
    target: Sharding,
    axes: SubMesh,
    links: Mapping[str, LinkCost] | None = None,
) -> tuple[Step, ...]:
    """The cheapest steps from one layout to another, one direction only."""
    source.check(atoms, axes)
    target.check(atoms, axes)
    # An axis of size 1 does nothing: along it all states are one.
    single = [axis for axis, size in axes.items() if size == 1]
    source, target = source.value.without(single), target.value.without(single)
    if source == target:
        return ()
    links = links or {}
    return cheapest(
        atoms, source, target, SubMesh.of(axes), tuple((axis, links.get(axis, LinkCost())) for axis in axes)
    )
