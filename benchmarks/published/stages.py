"""Assignment of a decoder's blocks to the stages of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.published.models import Decoder

__all__ = ["Stage", "stages_of"]


@dataclass(frozen=True)
class Stage:
    blocks: int
    # It has the embedding.
    first: bool
    # It has the head and the loss.
    last: bool


def stages_of(decoder: Decoder, pp: int, balanced: bool) -> list[Stage]:
    """Return the stages in their order."""
    counts, head = _balanced(decoder, pp) if balanced else (_even(decoder.layers, pp), pp - 1)
    return [Stage(count, first=i == 0, last=i == head) for i, count in enumerate(counts)]


def _even(layers: int, pp: int) -> list[int]:
    """Earlier stages have one more where it does not come out even."""
    return [layers // pp + (i < layers % pp) for i in range(pp)]


def _balanced(decoder: Decoder, pp: int) -> tuple[list[int], int]:
    """Return the blocks of each stage, and the stage of the head, which counts as a block.

    nanotron's way (`build_model` in its models/base.py): a stage takes blocks until it has more than its share of the
    parameters. Stages may be left with nothing at the end.
    """
    block, head = decoder.block_parameters, decoder.vocab * decoder.d_model
    whole = decoder.layers * block + head
    counts, stage, placed = [0] * pp, 0, 0
    for _ in range(decoder.layers):
        counts[stage] += 1
        placed += block
        if placed * pp > whole * (stage + 1):
            stage += 1
    return counts, stage
