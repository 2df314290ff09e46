"""Micro-batches: an axis of time that splits the batch of a call.

The statement `micro 8` of a layout splits the batch into eight micro-batches, one after the other. Propagation treats
them as an axis of eight places. Along it a tensor is replicated (computed once per call), split (a part in each
micro-batch), partial (parts add up after the last one) or broadcast (one value, whose gradients add up).
"""

from __future__ import annotations

from autopar.mesh import SubMesh
from autopar.sharding.sharding import Sharding, State

__all__ = ["MICRO", "place_in_time", "with_time", "without_time"]

# Name of the axis; nobody can write it, so it is no axis of a mesh.
MICRO = "micro-batch"


def with_time(axes: SubMesh, count: int) -> SubMesh:
    """Return the axes of a mesh and, for more than one micro-batch, the axis of time."""
    return axes if count == 1 else SubMesh({MICRO: count, **without_time(axes)})


def without_time(axes: SubMesh) -> SubMesh:
    """Return the axes of the mesh alone."""
    return SubMesh({axis: size for axis, size in axes.items() if axis != MICRO})


def place_in_time(sharding: Sharding) -> tuple[State, int | None]:
    """Return the state along the micro-batches, and the atom that they split."""
    return sharding.state(MICRO), sharding.atom(MICRO)
