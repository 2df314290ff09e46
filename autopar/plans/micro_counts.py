"""Numbers of micro-batches that a search tries, and those that are tried in halves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from autopar.ir.graph import NamedGraph
from autopar.mesh import Mesh
from autopar.plans.record import PlanRecord
from autopar.sharding.layout.language import Layout, choose_layout
from autopar.sharding.layout.syntax import MicroBatches, OpenMicroBatches

__all__ = ["counts_of", "halves_to_try", "with_open_micro"]

# Halves are tried where ops wait for messages of values for this share of a step.
WORTH_HALVES = 0.05


def with_open_micro(graph: NamedGraph, meshes: Sequence[Mesh], layout: str | Path | Layout | None) -> Layout | None:
    """Return the layout with an open number of micro-batches; None if it says one, or no dim is the batch."""
    said = Layout(()) if layout is None else choose_layout(layout, meshes[0].whole)
    if said.micro_batches is not None or said.open_micro_batches is not None or said.pipeline is not None:
        return None
    counts = tuple(counts_of(graph, "batch", several=True))
    return said.with_micro_batches(OpenMicroBatches(counts)) if counts[-1] > 1 else None


def counts_of(graph: NamedGraph, dim: str, several: bool) -> list[int]:
    """Return numbers of micro-batches that divide the batch, each twice the one before or more; `several` omits 1."""
    batch = graph.dims[dim].size if dim in graph.dims else 1
    found = [1]
    for count in range(2, batch + 1):
        if batch % count == 0 and count >= 2 * found[-1]:
            found.append(count)
    return found[1:] if several and len(found) > 1 else found


def halves_to_try(best: PlanRecord, asked: OpenMicroBatches) -> Iterator[MicroBatches]:
    """Yield the micro-batches in halves that may be faster than the best plan without halves.

    With half as many of them, parameters are gathered half as often, and their halves are as large.
    """
    if asked.halves or best.costs.seconds_of("values") < WORTH_HALVES * best.step_seconds:
        return
    count = 1 if best.decided.micro is None else best.decided.micro.count
    for halved in dict.fromkeys((count, max(1, count // 2))):
        if not asked.candidates or halved in asked.candidates:
            yield MicroBatches(halved, asked.dim, halves=True, span=asked.span)
