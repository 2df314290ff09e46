"""Traces of the decoders of published runs, at the batch sizes of these runs.

A decoder has blocks enough for a layer to repeat, without memory. One that a table has in many batch sizes is captured
with a symbolic batch, which costs as much as two traces; one of few sizes is traced at each.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from torch import nn

from autopar.ir.exported import Exported
from autopar.ir.graph import NamedGraph
from autopar.tracing.export.export import export
from autopar.tracing.sized_exports import SizedExports
from autopar.tracing.trace import named_graph
from benchmarks.published.models import Decoder, decoder_inputs, decoder_model
from benchmarks.published.runs import Run

__all__ = ["BLOCKS", "expect", "few_collections", "least_batch", "traced", "traced_decoder"]

# Blocks of the decoder that is traced: the fewest in which a layer repeats.
BLOCKS = 2
# Batch sizes that are traced one by one: a trace and a capture with a symbolic batch take as long as three traces.
ONE_BY_ONE = 3


def traced_decoder(decoder: Decoder) -> Decoder:
    """Return the decoder that stands for one of any number of blocks, tied or not."""
    return replace(decoder, layers=BLOCKS, tied=False)


@cache
def traced(decoder: Decoder, batch: int) -> NamedGraph:
    """Return the graph of a decoder for a whole micro-batch of all data-parallel ranks."""
    return named_graph(decoder_model(decoder), decoder_inputs(decoder, batch), export=_exports(decoder).export)


def expect(runs: Iterable[Run]) -> None:
    """Take note of the batch sizes at which the decoders of some runs will be traced."""
    for run in runs:
        for way in (run, *run.tries):
            _exports(traced_decoder(way.decoder)).batches.add(way.micro_batch * way.dp)


def least_batch(decoder: Decoder, batch: int, dp: int) -> int:
    """Return the smallest batch size to come that `dp` ranks share evenly, with a batch of 1 apart from others."""
    # A dim of size 1 is part of no sharding.
    alike = (one for one in _exports(decoder).batches if one % dp == 0 and (one > 1) == (batch > 1))
    return min((*alike, batch))


@contextmanager
def few_collections() -> Iterator[None]:
    """Leave cycles uncollected: graphs stay until the end, and each collection would visit all of them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


@dataclass
class _Exports:
    """Exports of one decoder."""

    # Batch sizes that are known to come.
    batches: set[int] = field(default_factory=set)
    sized: SizedExports = field(default_factory=SizedExports)

    def export(self, model: nn.Module, inputs: tuple[Any, ...] | Mapping[str, Any]) -> Exported:
        found = self.sized.export(model, inputs) if len(self.batches) > ONE_BY_ONE else export(model, inputs)
        if not gc.isenabled():
            # Free what the trace left in cycles; what stays need not be visited again.
            gc.collect()
            gc.freeze()
        return found


@cache
def _exports(decoder: Decoder) -> _Exports:
    return _Exports()
