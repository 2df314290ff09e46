"""Options of the search: the choices of an op, and the shardings in which a tensor may be stored."""

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
from autopar.sharding.choices import Choice, OpShardings, Passing, Site, choices, passings_of
from autopar.sharding.layout.parameter_storage import gather_action
from autopar.sharding.op_pins import allows, pinned_passings, pinned_sites, uneven_sites
from autopar.sharding.sharding import Atoms, Sharding, atoms_of, to_placements
from autopar.solver.search.joined_axes import MOST_AXES, AxisRoles, kind_of
from autopar.solver.setting import PlanningProblem

__all__ = ["OpSharding", "StorageOption", "is_dtensor_sharding", "options_of", "stored_of"]

# Uneven shards are an option if the longest is at most this multiple of the mean.
MOST_WASTE = 1.25


@dataclass(frozen=True)
class OpSharding:
    """Choice of an op with the shardings that it takes and gives."""

    choice: Choice
    operands: tuple[Sharding | None, ...]
    produced: tuple[Sharding | None, ...]


@dataclass(frozen=True)
class StorageOption:
    """Storage of an input, parameter or buffer; with `again`, the backward gathers it again."""

    layout: Sharding
    again: bool = False
    lasting: bool = False
    # Sharding to which it is resharded once for all ops that need it; other ops reshard for themselves.
    shared: Sharding | None = None

    def defers(self, want: Sharding) -> bool:
        """Return whether the gradient may wait for the last micro-batch: it is stored as it is used, or the copy
        stays.
        """
        return self.lasting or self.layout.splits == want.splits


class _NearlyEven:
    """Sites that axes split into nearly equal pieces, and sites that a pin allows to be uneven."""

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
    """Return the choices of an op that differ in the shardings of its tensors; `ways` restricts them.

    The order of axes in the mesh comes first.
    """
    found = () if ways is None else _options(setting, bound_layout, node, ways)
    return found or _options(setting, bound_layout, node, None)


def _options(
    setting: PlanningProblem, bound_layout: BoundLayout, node: NamedNode, ways: AxisRoles | None
) -> tuple[OpSharding, ...]:
    graph, axes = setting.graph, setting.used
    pin = bound_layout.pin(node)
    # Only sites longer than one can be split.
    long = [(factor, atom) for factor, extents in node.atoms.items() for atom, one in enumerate(extents) if one > 1]
    sites: Mapping[str, Sequence[Site]] = dict.fromkeys(axes, long)
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
    shardings = OpShardings(graph, node)
    for choice in choices(node, sites, axes, uneven, passes):
        layouts = shardings.under(choice)
        if layouts is None or layouts in found or (pin is not None and not allows(pin, choice, node)):
            continue
        if _uses_agree(setting, bound_layout, node, layouts[0]):
            found[layouts] = OpSharding(choice, *layouts)
    return tuple(found.values())


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
) -> tuple[StorageOption, ...]:
    """Return the storage options of a tensor: as used, whole, or split further by the axes that are left.

    With several micro-batches a gathered copy may stay until the optimizer steps; with one that saves nothing.
    """
    atoms = atoms_of(tensor)
    whole = Sharding.replicated(atoms)
    if tensor.kind in ("buffer", "constant"):
        return (StorageOption(whole),)
    wanted = bound_layout.stored_requests(tensor) if tensor.kind == "param" else bound_layout.requests(tensor, "input")
    bases = dict.fromkeys([whole, *(Sharding(use.splits) for use in uses)])
    found: dict[Sharding, None] = {}
    for base in bases:
        if is_dtensor_sharding(base, atoms, setting.axes):
            found[base] = None
        for layout in _split_further(setting, atoms, base) if tensor.kind == "param" else ():
            found[layout] = None
    kept = [layout for layout in found if any(matches(one, layout.splits) for one in wanted)]
    if not kept:
        kept = list(dict.fromkeys(Sharding(tuple(axes or () for axes in one)) for one in wanted))
    ways = [StorageOption(layout) for layout in kept]
    if tensor.kind == "param" and setting.trains:
        split = [layout for layout in kept if any(layout.splits)]
        held = None if bound_layout.is_empty else gather_action(bound_layout.layout, tensor)
        if held == "regather":
            return tuple(StorageOption(layout, again=any(layout.splits)) for layout in kept)
        ways += [StorageOption(layout, again=True) for layout in split if regather and held is None]
        if setting.call is not None:
            gathered = [StorageOption(layout, lasting=any(layout.splits)) for layout in kept]
            return (*gathered, *(one for one in ways if one.again))
        if setting.options.micro_batches > 1:
            ways += [StorageOption(layout, lasting=True) for layout in split]
    return tuple(ways)


def _split_further(setting: PlanningProblem, atoms: Atoms, base: Sharding) -> Iterable[Sharding]:
    """Yield the shardings that split one more dim: for each product of free axes the first divisible dim.

    On a mesh of many axes only the order of the mesh is tried.
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
        if is_dtensor_sharding(Sharding(splits), atoms, setting.axes):
            return Sharding(splits)
    return None


def is_dtensor_sharding(layout: Sharding, atoms: Atoms, axes: SubMesh) -> bool:
    """Return whether a DTensor can have this sharding."""
    try:
        to_placements(Sharding(layout.splits), atoms, axes)
    except LayoutError:
        return False
    return True
