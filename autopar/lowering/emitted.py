"""`Emitted`: the value that lowering hands to the runtime."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.fx import GraphModule

from autopar.lowering.passes.hoist_small_sums import HoistedSums
from autopar.lowering.passes.random_ops import DrawnOp
from autopar.sharding.reshard_insertion import InsertedReshard
from autopar.sharding.sharding import Sharding

__all__ = ["Emitted"]


@dataclass(frozen=True)
class Emitted:
    """The generated graph of one rank, the reshards in it, and the shardings of its results."""

    graph_module: GraphModule
    inserted: tuple[InsertedReshard, ...]
    # Name and sharding of each result of the model; None for one that is no tensor.
    results: tuple[tuple[str, Sharding] | None, ...]
    # Ops that draw random numbers on several ranks; with any, the graph has one more input, their key.
    draws: tuple[DrawnOp, ...] = ()
    # Small sums that are made before and after the graph.
    ends: HoistedSums = field(default_factory=HoistedSums)
