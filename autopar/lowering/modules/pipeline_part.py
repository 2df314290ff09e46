"""Parts of a pipeline on one stage: their graphs, results, routes, and inputs that other stages read too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.fx import GraphModule

from autopar.lowering.collectives.stage_messages import Crossing, StageMessages
from autopar.lowering.modules.micro_loop import LoopResult

__all__ = ["PartResult", "PartWays", "PipelinePart", "TiedInput"]


@dataclass(frozen=True)
class TiedInput:
    """Input of the loop that one stage has and other stages read, as a tied parameter."""

    # Place among the inputs of the loop; behind them on a stage that receives it.
    place: int
    # The stage that has it, and those that it is sent to.
    source: int
    targets: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool


@dataclass(frozen=True)
class PartResult:
    """Result of the loop: the part that makes it, how its values are joined, and the shape and dtype of one value."""

    result: LoopResult
    source: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool

    @property
    def joined_shape(self) -> tuple[int, ...]:
        return self.shape if self.result.kind == "sum" else self.result.shape


@dataclass(frozen=True)
class PipelinePart:
    """Graph of a part, called with the number of the micro-batch, then inputs of the loop, then received values."""

    body: GraphModule
    # Places of the inputs of the loop that it reads, and of tied ones.
    inputs: tuple[int, ...]
    received: tuple[Crossing, ...]
    # The first results of the graph; then come the values of the results of the loop.
    sent: tuple[Crossing, ...]
    results: tuple[int, ...]


class PartWays(NamedTuple):
    """Routes of the values that a part receives, and of each value that it sends; gradients go back on them."""

    received: tuple[tuple[int, bool], ...]
    sent: tuple[tuple[tuple[int, ...], bool], ...]

    @classmethod
    def of(cls, number: int, part: PipelinePart, messages: StageMessages) -> PartWays:
        return cls(
            tuple((messages.numbers[one.name, number], one.differentiable) for one in part.received),
            tuple(
                (tuple(messages.numbers[one.name, target] for target in one.targets), one.differentiable)
                for one in part.sent
            ),
        )
