"""Small sums over ranks at the two ends of a call, which `hoist_small_sums` has moved there.

Those before the graph are begun when a call begins. Those after it are results: tensors that wait for the other ranks
when somebody reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import GraphModule

from autopar.lowering.collectives.local_reshard import LocalReshard, convert, restored, send
from autopar.lowering.modules.late_tensor import LateTensor
from autopar.lowering.passes.join_small_sums import joined

__all__ = ["ROOM", "HoistedSums", "LateResult", "NumberExchange", "wrapped"]

# Numbers that fit in a comparison of the ranks: so many sums of a call are sent with it.
ROOM = 7
Rows = Sequence[Sequence[int | float]]


class NumberExchange(Protocol):
    """Exchange of a few numbers between the ranks of a mesh."""

    @property
    def is_cheap(self) -> bool:
        """True where no device waits for it; else collectives are cheaper."""
        ...

    def exchange(self, numbers: Sequence[int | float], last: bool) -> Callable[[str], Rows]:
        """Begin to send some numbers, after the graph or before it.

        Return a function that waits for the numbers of a group's members, a row for each.
        """
        ...


@dataclass(frozen=True)
class LateResult:
    """Result of a graph that is this rank's part of a sum."""

    # One tensor may be several results.
    places: tuple[int, ...]
    conversion: LocalReshard
    # Number of the early sum by which the sum is divided.
    divisor: int | None = None


@dataclass(frozen=True)
class HoistedSums:
    """Sums before and after a graph."""

    # Graph from some of the inputs to this rank's parts of the sums that are sent before.
    before: GraphModule | None = None
    # Places of these inputs among all inputs of the graph.
    places: tuple[int, ...] = ()
    early: tuple[LocalReshard, ...] = ()
    # Numbers of the early sums that are the last inputs of the graph.
    taken: tuple[int, ...] = ()
    late: tuple[LateResult, ...] = ()
    # Sums that are sent before, and after.
    notes: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())

    @property
    def outline(self) -> str:
        """Return the values that all ranks must share for their exchanges to match."""
        early = [(one.result_shape, one.reshard.forward) for one in self.early]
        late = [(one.places, one.conversion.result_shape, one.conversion.reshard.forward) for one in self.late]
        return f"{early} {self.taken} {late} {[one.divisor for one in self.late]}"

    def first(self, values: Sequence[Any], exchanges: NumberExchange) -> list[Tensor]:
        """Return the sums before the graph, which may be pending."""
        if self.before is None:
            return []
        with torch.no_grad():
            # `forward` and not a call, which would look for hooks: once a step, with cold caches, that takes time.
            parts = self.before.forward(*[values[place] for place in self.places])
            arrivals = _arrivals(self.early, parts, exchanges, last=False)
            return [LateTensor.of(x, arrival) for x, arrival in zip(parts, arrivals, strict=True)]

    def last(self, outputs: tuple[Any, ...], early: Sequence[Tensor], exchanges: NumberExchange) -> tuple[Any, ...]:
        """Return the results with the sums after the graph, which may be pending.

        `early`: the sums before the graph.
        """
        if not self.late:
            return outputs
        found = list(outputs)
        parts = [outputs[one.places[0]] for one in self.late]
        divisors = [None if one.divisor is None else early[one.divisor] for one in self.late]
        conversions = tuple(one.conversion for one in self.late)
        sums = _Sums.apply(conversions, divisors, exchanges, *parts)  # type: ignore[no-untyped-call]
        for one, value in zip(self.late, sums, strict=True):
            for place in one.places:
                found[place] = value
        if not any(part.requires_grad for part in parts):  # no backward will come before somebody looks
            LateTensor.arrive_all(sums)
        return tuple(found)


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        conversions: tuple[LocalReshard, ...],
        divisors: Sequence[Tensor | None],
        exchanges: NumberExchange,
        *parts: Tensor,
    ) -> tuple[Tensor, ...]:
        arrivals = _arrivals(conversions, parts, exchanges, last=True)
        found = [
            LateTensor.of(x, arrival if divisor is None else partial(_quotient, arrival, divisor))
            for x, arrival, divisor in zip(parts, arrivals, divisors, strict=True)
        ]
        ctx.conversions, ctx.divisors = conversions, divisors
        whole = [not (part.is_floating_point() or part.is_complex()) for part in parts]
        ctx.mark_non_differentiable(*(x for x, is_whole in zip(found, whole, strict=True) if is_whole))
        ctx.set_materialize_grads(False)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        found: list[Tensor | None] = list(gradients)
        if torch.is_grad_enabled():  # for gradients of gradients: each is summed like the sums themselves
            pairs = zip(gradients, ctx.conversions, strict=True)
            found = [None if x is None else convert(x, one, backward=True) for x, one in pairs]
        for place, divisor in enumerate(ctx.divisors):
            x = found[place]
            if x is not None and divisor is not None:
                LateTensor.arrive_all(divisor)
                found[place] = x / divisor.to(x.dtype)
        return None, None, None, *found


def _quotient(arrival: Callable[[], Tensor | complex], divisor: Tensor) -> Tensor:
    total = arrival()
    LateTensor.arrive_all(divisor)
    if not isinstance(total, Tensor):
        total = torch.tensor(total, dtype=torch.complex128 if type(total) is complex else torch.float64)
    return total / divisor.to(total.dtype)


def _arrivals(
    conversions: Sequence[LocalReshard], parts: Sequence[Tensor], exchanges: NumberExchange, last: bool
) -> list[Callable[[], Tensor | complex]]:
    """Begin to sum up parts; return for each a function that waits for the sum."""
    if not exchanges.is_cheap:
        return _collectives(conversions, parts)
    numbers: list[int | float] = []
    pieces = []
    for x in parts:
        begin = len(numbers)
        own = torch.view_as_real(x.detach()) if x.is_complex() else x.detach()
        numbers += own.reshape(-1).tolist() if own.ndim else [own.item()]
        pieces.append(slice(begin, len(numbers)))
    sent = exchanges.exchange(numbers, last)
    return [
        partial(_received, sent, one.forward[0].group, piece, x.dtype, one.result_shape)
        for x, one, piece in zip(parts, conversions, pieces, strict=True)
    ]


def wrapped(number: complex) -> complex:
    """Return a sum of integers wrapped around like sums of tensors."""
    return (number + 2**63) % 2**64 - 2**63 if isinstance(number, int) else number


def _collectives(conversions: Sequence[LocalReshard], parts: Sequence[Tensor]) -> list[Callable[[], Tensor | complex]]:
    """Begin to sum up parts by collectives, one for each group."""
    found: dict[int, Callable[[], Tensor | complex]] = {}
    groups: dict[str, list[int]] = {}
    for place, one in enumerate(conversions):
        groups.setdefault(one.forward[0].group, []).append(place)
    for places in groups.values():
        total, begin = send(conversions[places[0]].forward[0], joined([parts[place] for place in places])), 0
        for place in places:
            end = begin + parts[place].numel()
            found[place] = partial(_piece, total, slice(begin, end), parts[place].dtype)
            begin = end
    return [found[place] for place in range(len(parts))]


def _piece(total: Tensor, piece: slice, dtype: torch.dtype) -> Tensor:
    return restored(torch.ops._c10d_functional.wait_tensor(total)[piece], dtype)


def _received(
    sent: Callable[[str], Rows], group: str, piece: slice, dtype: torch.dtype, shape: tuple[int, ...]
) -> Tensor | complex:
    columns = list(zip(*sent(group), strict=True))[piece]
    if dtype.is_complex:
        columns = [tuple(map(complex, *pair)) for pair in zip(columns[::2], columns[1::2], strict=True)]
    sums = [wrapped(sum(column)) for column in columns]
    if not shape and dtype is torch.int64:
        return sums[0]
    if not dtype.is_floating_point and not dtype.is_complex:  # a sum may not fit: it runs over
        return torch.tensor(sums, dtype=torch.int64).to(dtype).reshape(shape)
    return torch.tensor(sums, dtype=dtype).reshape(shape) if shape else sums[0]
