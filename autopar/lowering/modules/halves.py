"""Steps of a micro-batch whose halves run side by side: a reshard in two calls, and the results of both halves.

The first call of a reshard starts its last collective, the second waits for it; between them a rank computes something
else. Autograd runs last what was called first, so in the backward the gradient is on its way while the gradients of
that are computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar.lowering.modules.micro_loop import LoopResult
from autopar.lowering.modules.shard_ops import ReshardModule

__all__ = ["HalfNumber", "HalvesResult", "ReshardBegin", "ReshardEnd"]


class HalfNumber(nn.Module):
    """Number of a half among those of all micro-batches, from the number of its micro-batch."""

    def __init__(self, which: int) -> None:
        super().__init__()
        self.which = which

    def forward(self, micro_batch: int) -> int:
        return 2 * micro_batch + self.which


class HalvesResult(nn.Module):
    """Join the parts of both halves to the part of a micro-batch."""

    def __init__(self, result: LoopResult) -> None:
        super().__init__()
        self.result = result

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        if self.result.kind == "sum":
            return first + second
        return torch.cat([self.result.part(first), self.result.part(second)], self.result.atom)

    def extra_repr(self) -> str:
        return self.result.kind


class ReshardBegin(ReshardModule):
    """Start a reshard. A compiler gets all of it, since it orders collectives itself."""

    def __init__(self, whole: ReshardModule) -> None:
        super().__init__(whole.conversion, *whole.notes)
        self.whole = whole

    def forward(self, x: Tensor, *tensors: Tensor) -> Any:
        return self.whole(x, *tensors) if torch.compiler.is_compiling() else _BegunReshard(x, self.whole, tensors)


class ReshardEnd(nn.Module):
    """Wait for a reshard."""

    def forward(self, begun: Tensor | _BegunReshard) -> Tensor:
        return begun.end() if isinstance(begun, _BegunReshard) else begun


# -- a reshard on its way ----------------------------------------------------------------------------------------------


class _BegunReshard:
    """A tensor on its way to its new sharding. It has no second derivative: micro-batches have none."""

    def __init__(self, x: Tensor, module: ReshardModule, tensors: tuple[Tensor, ...]) -> None:
        self.flight, self.tensors = _Flight(module), tensors
        self.arrive: Callable[[], Tensor] | None = None
        # The start of the reshard in autograd's graph; None if it is not differentiated.
        self.start: Tensor | None = None
        if x.requires_grad and torch.is_grad_enabled():
            self.start = _BeginReshard.apply(x, self.flight)  # type: ignore[no-untyped-call]
        self.arrive = module.begin(x.detach(), False, tensors)

    def end(self) -> Tensor:
        """Wait for the tensor."""
        if self.start is None:
            return self.arrived()
        ended: Tensor = _EndReshard.apply(self.start, self, *self.tensors)  # type: ignore[no-untyped-call]
        return ended

    def arrived(self) -> Tensor:
        assert self.arrive is not None, "a reshard ends once"
        arrive, self.arrive = self.arrive, None
        return arrive()

    def __del__(self) -> None:
        # The recompute of a layer stops where it has all that the backward needs, perhaps before this end.
        if self.arrive is not None:
            self.arrive()


@dataclass(eq=False)
class _Flight:
    """Gradient of a reshard on its way back, which both of its calls know."""

    module: ReshardModule
    gradient: Callable[[], Tensor] | None = None


class _BeginReshard(torch.autograd.Function):
    """Start of a reshard: an element that stands for the tensor; its backward waits for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: _Flight) -> Tensor:
        ctx.flight = flight
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, None]:
        arrive, ctx.flight.gradient = ctx.flight.gradient, None
        return None if arrive is None else arrive(), None


class _EndReshard(torch.autograd.Function):
    """End of a reshard: the tensor itself; its backward starts to send the gradient."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, begun: _BegunReshard, *tensors: Tensor) -> Tensor:
        ctx.flight = begun.flight
        ctx.save_for_backward(*tensors)
        return begun.arrived()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        flight, tensors = ctx.flight, ctx.saved_tensors
        flight.gradient = flight.module.begin(gradient, True, tensors)
        return gradient.new_zeros(()), None, *[None] * len(tensors)
