"""What may be decided: the choices of an op, and the layouts in which a tensor may be stored."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations
from math import prod
from typing import Any, cast

from autopar.errors import LayoutError
from autopar.ir.values import NamedNode, NamedTensor
from autopar.mesh import SubMesh
from autopar.sharding.bound_layout import BoundLayout, matches
from autopar.sharding.choices import Choice, Passing, Site, choices, passings_of, shardings_of
from autopar.sharding.dtensor_placements import to_placements
from autopar.sharding.layout.parameter_storage import gather_action
from autopar.sharding.op_pins import allows, pinned_passings, pinned_sites, uneven_sites
from autopar.sharding.sharding import Atoms, Sharding, atoms_of
from autopar.solver.search.joined_axes import MOST_AXES, AxisRoles, kind_of
from autopar.solver.setting import PlanningProblem

__all__ = ["OpSharding", "StorageOption", "can_be_held", "options_of", "stored_of"]

MOST_WASTE = 1.25
"""Uneven shards are considered where the longest one is at most so many times the mean."""


@dataclass(frozen=True)
class OpSharding:
    """One choice of an op with the layouts that it takes and gives."""

    choice: Choice
    operands: tuple[Sharding | None, ...]
    produced: tuple[Sharding | None, ...]


@dataclass(frozen=True)
class StorageOption:
    """How an input, parameter or buffer is held; `again`: what is gathered of it is gathered again in the backward."""

    layout: Sharding
    again: bool = False
    lasting: bool = False
    shared: Sharding | None = None
    """What it is converted to once for all ops that take it so; what others take is made for each of them."""

    def defers(self, want: Sharding) -> bool:
        """Whether a gradient may wait for the last micro-batch: it is stored as it is used, or the copy stays."""
        return self.lasting or self.layout.splits == want.splits


class _NearlyEven:
    """The sites that axes cut in pieces of nearly one length, and those that a pin allows to be uneven."""

    def __init__(self, node: NamedNode, axes: SubMesh, pinned: Collection[object]) -> None:
        self.node = node
        self.axes = axes
        self.pinned = pinned

    def __contains__(self, item: object) -> bool:
        (factor, atom), used = cast(tuple[Site, tuple[str, ...]], item)
        extent = self.node.atoms[factor][atom]
        count = prod(self.axes[axis] for axis in used)
        return item in self.pinned or -(-extent // count) * count <= MOST_WASTE * extent

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("asked for one at a time")

    def __len__(self) -> int:
        raise AssertionError("asked for one at a time")


def options_of(
    setting: PlanningProblem, bound_layout: BoundLayout, node: NamedNode, ways: AxisRoles | None = None
) -> tuple[OpSharding, ...]:
    """All choices of an op that differ in the layouts of its tensors, or, where there is one, all in these `ways`.

    The mesh's order of axes comes first.
    """
    found = () if ways is None else _options(setting, bound_layout, node, ways)
    return found or _options(setting, bound_layout, node, None)


def _options(
    setting: PlanningProblem, bound_layout: BoundLayout, node: NamedNode, ways: AxisRoles | None
) -> tuple[OpSharding, ...]:
    graph, axes = setting.graph, setting.used
    pin = bound_layout.pin(node)
    sites: Mapping[str, Sequence[Site]] = dict.fromkeys(axes, _sites(node))
    passes: Mapping[str, tuple[Passing, ...]] = dict.fromkeys(axes, passings_of(graph, node))
    if ways is not None:
        kind = kind_of(node)
        sites = {axis: ways.sites[kind].get(axis, ()) for axis in axes}
        passes = {axis: ways.passes[kind].get(axis, ()) for axis in axes}
    if pin is not None:
        sites = pinned_sites(pin, node)
        own = pinned_passings(pin, node)
        passes = {axis: own.get(axis, every) for axis, every in passes.items() if axis not in sites}
    uneven = _NearlyEven(node, axes, () if pin is None else uneven_sites(pin, node))
    found: dict[object, OpSharding] = {}
    for choice in choices(node, sites, axes, uneven, passes):
        layouts = shardings_of(graph, node, choice)
        if layouts is None or layouts in found or (pin is not None and not allows(pin, choice, node)):
            continue
        if _uses_agree(setting, bound_layout, node, layouts[0]):
            found[layouts] = OpSharding(choice, *layouts)
    return tuple(found.values())


def _sites(node: NamedNode) -> list[Site]:
    """What is longer than one, and so can be split."""
    return [
        (factor, atom) for factor, extents in node.atoms.items() for atom, extent in enumerate(extents) if extent > 1
    ]


def _uses_agree(
    setting: PlanningProblem, bound_layout: BoundLayout, node: NamedNode, operands: tuple[Sharding | None, ...]
) -> bool:
    if bound_layout.is_empty:
        return True
    for name, layout in zip(node.operands, operands, strict=True):
        if name is None or layout is None:
            continue
        tensor = setting.graph.tensors[name]
        if tensor.kind != "activation" and not bound_layout.allows_use(
            tensor, layout, bound_layout.pin(node) is not None
        ):
            return False
    return True


def stored_of(
    setting: PlanningProblem,
    bound_layout: BoundLayout,
    tensor: NamedTensor,
    uses: Iterable[Sharding],
    regather: bool = False,
    lasting: bool = False,
) -> tuple[StorageOption, ...]:
    """In how many ways a tensor may be held: as it is used, whole, or split further by axes that are left.

    `lasting`: what is gathered may stay until the optimizer steps, also where there is one micro-batch.
    """
    atoms = atoms_of(tensor)
    whole = Sharding.replicated(atoms)
    if tensor.kind in ("buffer", "constant"):
        return (StorageOption(whole),)
    wanted = bound_layout.stored_requests(tensor) if tensor.kind == "param" else bound_layout.requests(tensor, "input")
    bases = dict.fromkeys([whole, *(Sharding(use.splits) for use in uses)])
    found: dict[Sharding, None] = {}
    for base in bases:
        if can_be_held(base, atoms, setting.axes):
            found[base] = None
        for layout in _split_further(setting, atoms, base) if tensor.kind == "param" else ():
            found[layout] = None
    kept = [layout for layout in found if any(matches(one, layout.splits) for one in wanted)]
    if not kept:
        kept = list(dict.fromkeys(Sharding(tuple(axes or () for axes in one)) for one in wanted))
    ways = [StorageOption(layout) for layout in kept]
    if tensor.kind == "param" and tensor.requires_grad:
        split = [layout for layout in kept if any(layout.splits)]
        held = None if bound_layout.is_empty else gather_action(bound_layout.layout, tensor)
        if held == "regather":
            return tuple(StorageOption(layout, again=any(layout.splits)) for layout in kept)
        ways += [StorageOption(layout, again=True) for layout in split if regather and held is None]
        ways += [
            StorageOption(layout, lasting=True) for layout in split if lasting or setting.options.micro_batches > 1
        ]
    return tuple(ways)


def _split_further(setting: PlanningProblem, atoms: Atoms, base: Sharding) -> Iterable[Sharding]:
    """For each product of axes that are left, one dim that they split as well: the first that they divide.

    On a mesh of many axes only in the mesh's order.
    """
    left = [axis for axis in setting.used if axis not in base.axes]
    ordered = permutations if len(setting.used) <= MOST_AXES else combinations
    for count in range(1, len(left) + 1):
        for added in ordered(left, count):
            layout = _first_split(setting, atoms, base, added)
            if layout is not None:
                yield layout


def _first_split(setting: PlanningProblem, atoms: Atoms, base: Sharding, added: tuple[str, ...]) -> Sharding | None:
    count = prod(setting.axes[axis] for axis in added)
    for place, size in enumerate(atoms.sizes):
        own = base.splits[place]
        if size % (count * prod(setting.axes[axis] for axis in own)):
            continue
        splits = tuple((*own, *added) if i == place else axes for i, axes in enumerate(base.splits))
        if can_be_held(Sharding(splits), atoms, setting.axes):
            return Sharding(splits)
    return None


def can_be_held(layout: Sharding, atoms: Atoms, axes: SubMesh) -> bool:
    """Whether a DTensor can be laid out so."""
    try:
        to_placements(Sharding(layout.splits), atoms, axes)
    except LayoutError:
        return False
    return True
