"""Convert shardings to DTensor placements.

A placement names a physical dim, one per mesh dim in the order of the mesh. An axis may split a minor atom of a dim, or
split in another order than the mesh's. Its pieces are then strided in the dim, and the placement is a `_StridedShard`,
which exists for even pieces only. `autopar.runtime.strided_dtensor` lets DTensor gather them.
"""

from __future__ import annotations

from math import prod

from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from autopar.errors import LayoutError
from autopar.mesh import SubMesh
from autopar.sharding.sharding import Atoms, Sharding


def to_placements(sharding: Sharding, atoms: Atoms, axes: SubMesh, tensor: str = "the tensor") -> tuple[Placement, ...]:
    """Return one placement per mesh axis, or raise E4 naming `tensor`."""
    sharding.check(atoms, axes)
    dims = {atom: dim for dim, members in enumerate(atoms.members) for atom in members}
    placements: list[Placement] = []
    for axis in axes:
        atom = sharding.atom(axis)
        if atom is None:
            placements.append(Partial() if axis in sharding.partial else Replicate())
            continue
        # A stride of 1 is a plain shard; any other makes blocks in which the axis cuts.
        stride = _stride(sharding, atoms, axes, axis, dims[atom])
        _check_even(sharding, atoms, axes, dims[atom], tensor)
        placements.append(Shard(dims[atom]) if stride == 1 else _StridedShard(dims[atom], split_factor=stride))
    return tuple(placements)


def _stride(sharding: Sharding, atoms: Atoms, axes: SubMesh, axis: str, dim: int) -> int:
    """Return the number of blocks of a dim in each of which the axis cuts."""
    order = list(axes)
    earlier = set(order[: order.index(axis)])
    stride = 1
    for atom in atoms.members[dim]:
        split = sharding.splits[atom]
        if axis in split:
            return stride * prod(axes[major] for major in split[: split.index(axis)] if major not in earlier)
        stride *= atoms.sizes[atom] // prod(axes[major] for major in split if major in earlier)
    raise AssertionError(f"axis '{axis}' does not split dim {dim} in {sharding}")


def _check_even(sharding: Sharding, atoms: Atoms, axes: SubMesh, dim: int, tensor: str) -> None:
    # Uneven pieces are contiguous only if one atom is cut by axes in the order of the mesh.
    members = atoms.members[dim]
    places = {axis: place for place, axis in enumerate(axes)}
    simple = len(members) == 1 and sorted(sharding.splits[members[0]], key=places.__getitem__) == [
        *sharding.splits[members[0]]
    ]
    for atom in members:
        split = sharding.splits[atom]
        count, size = prod(axes[axis] for axis in split), atoms.sizes[atom]
        if not simple and size % count:
            why = (
                f"the dim is compound, with atoms {tuple(atoms.sizes[atom] for atom in members)}"
                if len(members) > 1
                else f"the mesh has its axes in the order {', '.join(axes)}"
            )
            raise LayoutError(
                "E4",
                f"{tensor}: dim {dim} cannot be stored split by {'*'.join(split)}: {size} is not divisible by {count}, "
                f"and {why}, so the uneven pieces would lie strided, which no DTensor placement describes\n"
                f"fix: split by axes whose product divides {size}, or another dim",
            )
