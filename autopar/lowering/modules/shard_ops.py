"""Modules that emit inserts: reshards, and ops that need more than torch's op to run on shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from autopar.lowering.collectives.local_reshard import LocalReshard
from autopar.rules.shard_call.dispatch import LOWERINGS
from autopar.rules.shard_call.local_call import FactorSlice, LocalCall
from autopar.sharding.lowered_ops import LoweredOpContext
from autopar.sharding.lowered_ops.base import Send

__all__ = ["LocalOpModule", "LoweredOpModule", "ReshardModule"]


class ReshardModule(nn.Module):
    """Run a reshard as a step of the generated graph."""

    def __init__(self, conversion: LocalReshard, note: str) -> None:
        super().__init__()
        self.conversion = conversion
        self.notes = (note,)

    def forward(self, x: Tensor) -> Tensor:
        return self.conversion(x)

    def extra_repr(self) -> str:
        return str(self.conversion.reshard)


class LocalOpModule(nn.Module):
    """Run an op with a split factor through a function of autopar (a masked lookup)."""

    def __init__(self, local: LocalCall, pieces: tuple[FactorSlice, ...], names: tuple[str, ...]) -> None:
        super().__init__()
        self.local = local
        self.pieces = pieces
        self.names = names

    def forward(self, *tensors: Any) -> Any:
        local = self.local.with_arguments(**dict(zip(self.names, tensors, strict=True)))
        for piece in self.pieces:
            lowering = local.rule.lowering(piece.factor)
            if lowering is not None:
                local = LOWERINGS[lowering](local, piece)
        return local.run()

    def extra_repr(self) -> str:
        return f"{self.local.op} split {', '.join(piece.factor for piece in self.pieces)}; rule {self.local.rule}"


class LoweredOpModule(nn.Module):
    """Run an op that exchanges messages with other shards (a halo exchange, statistics of all shards)."""

    def __init__(
        self,
        split: LoweredOpContext,
        local: LocalCall,
        pieces: Mapping[str, FactorSlice],
        names: tuple[str, ...],
        sends: tuple[Send, ...],
    ) -> None:
        super().__init__()
        self.split = split
        self.local = local
        self.pieces = pieces
        self.names = names
        self.sends = sends
        self.notes: tuple[str, ...] = ()

    def forward(self, *tensors: Any) -> Any:
        local = self.local.with_arguments(**dict(zip(self.names, tensors, strict=True)))
        return self.split.lowering.run(self.split, local, self.pieces, self.sends)

    def extra_repr(self) -> str:
        factors = ", ".join(f"{factor} -> {'*'.join(axes)}" for factor, axes in self.split.factors.items())
        return f"{self.local.op} split {factors}; rule {self.local.rule}"
