"""Modules of the generated graph: reshards, and ops that need more than torch's op to run on shards.

`random_draws` gives the numbers of ops that draw random numbers, plain torch does the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autopar.lowering.collectives.key_ring import LocalKeyRing
from autopar.lowering.collectives.local_reshard import LocalReshard
from autopar.lowering.modules.random_draws import DropoutMask, OpSample, RandomDraw, RreluSlopes, draw, known
from autopar.rules.shard_call.dispatch import LOWERINGS
from autopar.rules.shard_call.dropout import attend_dropped, dropped, scale_of
from autopar.rules.shard_call.local_call import FactorSlice, LocalCall
from autopar.sharding.lowered_ops import LoweredOpContext
from autopar.sharding.lowered_ops.base import Send


class ReshardModule(nn.Module):
    """Run a reshard as a step of the generated graph."""

    def __init__(self, conversion: LocalReshard, note: str) -> None:
        super().__init__()
        self.conversion = conversion
        self.notes = (note,)

    def forward(self, x: Tensor) -> Tensor:
        return self.conversion(x)

    def begin(self, x: Tensor, backward: bool, tensors: Sequence[Tensor]) -> Callable[[], Tensor]:
        """Start to send; the function that is returned waits for the result. Neither is differentiated."""
        return self.conversion.begin(x, backward)

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
        sends: tuple[Send | LocalKeyRing, ...],
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


# -- random ops --------------------------------------------------------------------------------------------------------


aten = torch.ops.aten


class RandomOp(nn.Module):
    """Op that draws random numbers, called with the key of the call and the op's tensors."""

    def __init__(self, what: RandomDraw, rule: str) -> None:
        super().__init__()
        self.what = what
        self.rule = rule
        self.draw = known(what)
        # Set where micro-batches draw numbers of their own.
        self.varies = False

    def extra_repr(self) -> str:
        shard = self.what.shard
        return f"shard {shard.index} of {shard.count}; rule {self.rule}"


class Dropout(RandomOp):
    """Dropout; `with_mask` returns the mask too, as `native_dropout` does."""

    def __init__(self, what: DropoutMask, rule: str, with_mask: bool) -> None:
        super().__init__(what, rule)
        self.scale = scale_of(what.rate)
        self.with_mask = with_mask

    def forward(self, key: Tensor, x: Tensor) -> Any:
        kept = draw(key, (), self.draw)
        result = dropped(x, kept, self.scale)
        return (result, kept) if self.with_mask else result


class Rrelu(RandomOp):
    """Randomised leaky ReLU; `with_noise` returns the slopes too. Its noise operand is only written to."""

    def __init__(self, what: RreluSlopes, rule: str, with_noise: bool) -> None:
        super().__init__(what, rule)
        self.with_noise = with_noise

    def forward(self, key: Tensor, x: Tensor, noise: Tensor | None = None) -> Any:
        slopes = torch.where(x <= 0, draw(key, (x,), self.draw), 1)
        return (x * slopes, slopes) if self.with_noise else x * slopes


class SampledOp(RandomOp):
    """Op whose result has no gradient or a zero one: samples do not follow the operands smoothly."""

    def __init__(self, what: OpSample, rule: str, differentiable: bool) -> None:
        super().__init__(what, rule)
        self.differentiable = differentiable

    def forward(self, key: Tensor, *tensors: Tensor) -> Tensor:
        drawn = draw(key, tensors, self.draw)
        if self.differentiable and torch.is_grad_enabled():
            tied: Tensor = _WithoutSlope.apply(drawn, *tensors)  # type: ignore[no-untyped-call]
            return tied
        return drawn


class _WithoutSlope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, drawn: Tensor, *operands: Tensor) -> Tensor:
        ctx.shapes = [(x.shape, x.dtype) if x.is_floating_point() or x.is_complex() else None for x in operands]
        return drawn.view_as(drawn)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        zeros = [None if kind is None else gradient.new_zeros(kind[0], dtype=kind[1]) for kind in ctx.shapes]
        return None, *zeros


class Gamma(RandomOp):
    """Gamma sample, with the gradient of implicit differentiation."""

    def forward(self, key: Tensor, alpha: Tensor) -> Tensor:
        drawn = draw(key, (alpha,), self.draw)
        if not alpha.requires_grad:
            return drawn
        slope: Tensor = aten._standard_gamma_grad.default(alpha.detach(), drawn)
        return drawn + slope * (alpha - alpha.detach())


class DropoutAttention(RandomOp):
    """Attention with dropout of weights; the queries of this rank start at `first_row`."""

    def __init__(
        self, what: DropoutMask, rule: str, arguments: Mapping[str, Any], names: list[str], first_row: int
    ) -> None:
        super().__init__(what, rule)
        self.names = names
        self.first_row = first_row
        self.is_causal = bool(arguments["is_causal"])
        self.grouped = bool(arguments["enable_gqa"])
        self.factor = arguments["scale"]
        self.scale = scale_of(what.rate)

    def forward(self, key: Tensor, *tensors: Tensor) -> Tensor:
        given = dict(zip(self.names, tensors, strict=True))
        kept = draw(key, (), self.draw)
        options = self.is_causal, self.factor, self.grouped, self.first_row
        operands = given["query"], given["key"], given["value"], given.get("attn_mask")
        return attend_dropped(*operands, kept, self.scale, *options)
