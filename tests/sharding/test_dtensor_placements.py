"""DTensor placements: they cut a tensor exactly as the layout does, or are refused."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from itertools import permutations, product

import pytest
import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from autopar.errors import LayoutError
from autopar.sharding.sharding import Atoms, Sharding, coordinates, to_placements
from tests.simulation import all_layouts, scatter

CASES = [
    (Atoms.plain((12, 6)), {"a": 2, "b": 3}),
    (Atoms.plain((5, 7)), {"a": 2, "b": 3}),
    (Atoms((3, 4, 6), (3,)), {"a": 2, "b": 2}),
    (Atoms((6, 12, 2), (2, 1)), {"a": 2, "b": 3}),
    (Atoms((8, 8), (2,)), {"a": 2, "b": 2, "c": 2}),
    (Atoms((16, 3), (1, 1)), {"a": 2, "b": 2, "c": 2}),
    (Atoms((1, 8), (2,)), {"a": 2, "b": 2}),
]


def cut(value: torch.Tensor, placements: tuple[Placement, ...], axes: Mapping[str, int]) -> list[torch.Tensor]:
    """What torch itself gives to each rank: one mesh dim after the other."""
    local = []
    for coordinate in coordinates(axes):
        part = value
        for (axis, size), placement in zip(axes.items(), placements, strict=True):
            if isinstance(placement, Shard | _StridedShard):
                part = placement._split_tensor(part, size, with_padding=False)[0][coordinate[axis]]
        local.append(part)
    return local


def from_placements(placements: tuple[Placement, ...], atoms: Atoms, axes: Mapping[str, int]) -> Sharding:
    """Return a sharding with these placements, found by trying all; those in the order of the mesh first."""
    partial = frozenset(axis for axis, one in zip(axes, placements, strict=True) if isinstance(one, Partial))
    cut = [
        (axis, one.dim) for axis, one in zip(axes, placements, strict=True) if isinstance(one, Shard | _StridedShard)
    ]
    # Placements do not tell in which order axes split the atoms of a dim.
    for order in permutations(cut):
        for places in product(*(atoms.members[dim] for _, dim in order)):
            splits: list[list[str]] = [[] for _ in atoms.sizes]
            for (axis, _), atom in zip(order, places, strict=True):
                splits[atom].append(axis)
            found = Sharding(tuple(map(tuple, splits)), partial)
            with suppress(LayoutError):  # no DTensor has this sharding
                if to_placements(found, atoms, axes) == placements:
                    return found
    raise AssertionError(f"no sharding has the placements {placements}")


@pytest.mark.parametrize(("atoms", "axes"), CASES, ids=str)
def test_placements_cut_as_the_layout_does(atoms: Atoms, axes: Mapping[str, int]) -> None:
    value = torch.arange(float(torch.Size(atoms.shape).numel())).reshape(atoms.shape)
    held = refused = 0
    for layout in all_layouts(atoms, axes):
        if layout.partial or layout.broadcast:
            continue
        try:
            placements = to_placements(layout, atoms, axes)
        except LayoutError:
            refused += 1
            continue
        held += 1
        for mine, theirs in zip(scatter(value, layout, atoms, axes), cut(value, placements, axes), strict=True):
            assert torch.equal(mine, theirs), f"{layout} as {placements}"
    assert held
    even = all(size % torch.Size(axes.values()).numel() == 0 for size in atoms.sizes)
    several = len(axes) > 1 and max(atoms.dims, default=0) > 1  # DTensor does not gather all of these
    assert not (even and refused and not several)


@pytest.mark.parametrize(("atoms", "axes"), CASES, ids=str)
def test_there_and_back(atoms: Atoms, axes: Mapping[str, int]) -> None:
    for layout in all_layouts(atoms, axes):
        try:
            placements = to_placements(layout, atoms, axes)
        except LayoutError:
            continue
        back = from_placements(placements, atoms, axes)
        # Atoms of size 1 cannot be told from their neighbours; whatever comes back cuts the same way.
        assert to_placements(back, atoms, axes) == placements
        if min(atoms.sizes) > 1:
            assert back == layout.value


MESH = {"dp": 2, "tp": 4}


@pytest.mark.parametrize(
    ("layout", "atoms", "expected"),
    [
        (Sharding((("dp",), ("tp",))), Atoms.plain((8, 8)), (Shard(0), Shard(1))),
        (Sharding((("dp", "tp"), ())), Atoms.plain((7, 8)), (Shard(0), Shard(0))),
        (Sharding((("tp", "dp"), ())), Atoms.plain((8, 8)), (_StridedShard(0, split_factor=4), Shard(0))),
        (Sharding(((), ("tp",), ())), Atoms((3, 8, 16), (3,)), (Replicate(), _StridedShard(0, split_factor=3))),
        (Sharding(((),), frozenset({"tp"}), frozenset({"dp"})), Atoms.plain((8,)), (Replicate(), Partial())),
    ],
)
def test_the_placements_of_known_layouts(layout: Sharding, atoms: Atoms, expected: tuple[Placement, ...]) -> None:
    assert to_placements(layout, atoms, MESH) == expected


@pytest.mark.parametrize(
    ("layout", "atoms", "message"),
    [
        (
            Sharding(((), ("tp",), ())),
            Atoms((3, 6, 16), (3,)),
            r"block\.qkv\.weight: dim 0 cannot be stored split by tp: 6 is not divisible by 4, and the dim is "
            r"compound, with atoms \(3, 6, 16\)",
        ),
        (
            Sharding((("tp", "dp"),)),
            Atoms.plain((7,)),
            r"dim 0 cannot be stored split by tp\*dp: 7 is not divisible by 8, and the mesh has its axes in the order "
            r"dp, tp",
        ),
    ],
)
def test_what_a_dtensor_cannot_hold_is_refused(layout: Sharding, atoms: Atoms, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        to_placements(layout, atoms, MESH, "block.qkv.weight")


def test_several_axes_may_cut_one_dim_in_blocks() -> None:
    parts, axes = Atoms((4, 4), (2,)), {"a": 2, "b": 2}
    layout = Sharding((("b",), ("a",)))
    placements = to_placements(layout, parts, axes, "w")
    assert placements == (_StridedShard(0, split_factor=4), Shard(0))
    assert from_placements(placements, parts, axes) == layout
