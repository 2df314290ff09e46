"""What layouts are to DTensor: a tensor held as its placements say is put together right by DTensor."""

from __future__ import annotations

from itertools import permutations, product

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from autopar.errors import LayoutError
from autopar.runtime.strided_dtensor import support
from autopar.sharding.sharding import Atoms, Sharding, coordinates, to_placements
from tests.runtime.launcher import launch

AXES = {"a": 2, "b": 2}
UNEVEN = [Atoms((size,), (1,)) for size in (1, 3, 5, 6, 7, 9)]


def splits(atoms: Atoms) -> list[Sharding]:
    """Every way to split atoms by the axes."""
    found = []
    for where in product([None, *range(len(atoms.sizes))], repeat=len(AXES)):
        for order in permutations(AXES):
            places = dict(zip(AXES, where, strict=True))
            found.append(Sharding(tuple(tuple(x for x in order if places[x] == i) for i in range(len(atoms.sizes)))))
    return list(dict.fromkeys(found))


def gathered() -> tuple[list[str], int]:
    """The layouts that DTensor gathers or redistributes wrongly, also after an op, and how many there are."""
    mesh = init_device_mesh("cpu", tuple(AXES.values()), mesh_dim_names=tuple(AXES))
    mesh._flatten()  # as it is where ranks compare their calls: then DTensor may gather along both axes at once
    place = list(coordinates(AXES))[dist.get_rank()]
    wrong, count = [], 0
    for atoms in (Atoms((8,), (1,)), Atoms((12, 4), (2,)), Atoms((4, 4, 4), (3,)), Atoms((4, 8), (1, 1)), *UNEVEN):
        whole = torch.arange(torch.Size(atoms.sizes).numel())
        for layout in splits(atoms):
            try:
                placements = to_placements(layout, atoms, AXES)
            except LayoutError:
                continue
            part = whole.reshape(atoms.sizes)
            for atom, (start, length) in enumerate(layout.pieces(atoms, AXES, place)):
                part = part.narrow(atom, start, length)
            local = part.reshape(atoms.fold(tuple(part.shape))).clone()
            full = whole.reshape(atoms.shape)
            support(placements)
            held = DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())
            count += 1
            split = held.redistribute(placements=[Replicate(), Shard(0)])
            found = held.full_tensor(), torch.zeros_like(held).add_(held).full_tensor(), split.full_tensor()
            if not all(torch.equal(each, full) for each in found):
                wrong.append(f"{layout} of {atoms} as {placements}")
    return wrong, count


def test_a_dtensor_can_be_gathered() -> None:
    wrong, count = launch(gathered, ranks=4)[0]
    assert wrong == []
    assert count >= 70
