"""Work that attention has more where keys pass from rank to rank: calls of a kernel for each rank, and merges."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.values import NamedNode
from autopar.mesh import SubMesh
from autopar.sharding.choices import Choice
from autopar.sharding.lowered_ops.ring_attention import ring_works

__all__ = ["RingExtra", "ring_extra"]

# Bytes to merge one element of a result in float32: it is read and written, and that of the next keys is read.
MERGED_BYTES = 4 + 4 + 2


@dataclass(frozen=True)
class RingExtra:
    """Blocks of keys beyond the own one, bytes of merges for an element of the result, calls of a kernel."""

    more_blocks: int = 0
    merged_bytes: float = 0.0
    calls: int = 1


def ring_extra(node: NamedNode, choice: Choice, axes: SubMesh) -> RingExtra:
    """Return what a choice of attention adds; nothing where no axis splits the keys."""
    if not any(site[0] == "t" for site, _ in choice.splits):
        return RingExtra()
    works = ring_works(node, choice.splits, axes)
    passes = sum(work.rows for work in works) / max(works[0].rows, 1) - 1
    return RingExtra(len(works) - 1, MERGED_BYTES * max(passes, 0.0), max(1, sum(work.calls for work in works)))
