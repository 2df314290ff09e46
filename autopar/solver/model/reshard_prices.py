"""Sums of one reshard: of a value where it is needed, or of a parameter in buckets that overlap computing."""

from __future__ import annotations

import re
from math import prod
from typing import NamedTuple

from autopar.cost.compute.op_time import seconds_of_bytes
from autopar.ir.values import NamedTensor
from autopar.sharding.buckets import BUCKET_BYTES, BUCKETS, LEAST_BYTES, goes_in_bucket
from autopar.sharding.reshard.reshard import ScaledReshards, StepKind, StepSize
from autopar.sharding.sharding import Sharding, longest
from autopar.solver.arrays import Floats
from autopar.solver.candidates import StorageOption
from autopar.solver.model.objective import Sum
from autopar.solver.setting import PlanningProblem

__all__ = ["ReshardSums", "TensorCut", "block_of"]

# A step, and the bytes of an element.
_Sent = tuple[StepSize, int]


class TensorCut(NamedTuple):
    """Properties of a tensor that its reshards depend on. A tuple, as tables are looked up by it."""

    sizes: tuple[int, ...]
    itemsize: int
    # It has a gradient.
    trained: bool

    @classmethod
    def of(cls, tensor: NamedTensor, setting: PlanningProblem) -> TensorCut:
        sizes = tuple(atom.size for atom in tensor.atoms)
        return cls(sizes, tensor.dtype.itemsize, tensor.requires_grad and setting.trains)


class _BucketShare(NamedTuple):
    """Share of a parameter in its bucket: seconds of links and host, forward and backward."""

    forward: tuple[float, float]
    backward: tuple[float, float]
    gathers: bool


class ReshardSums:
    """Reshards of one planning problem; each is priced once."""

    def __init__(self, setting: PlanningProblem) -> None:
        self.setting = setting
        self.costs = setting.prices.reshard_costs
        self.routes = ScaledReshards(setting.axes)
        self.prices: dict[tuple[tuple[int, ...], int, Sharding, Sharding, float], tuple[float, float]] = {}
        self.moved: dict[tuple[TensorCut, Sharding, Sharding, float], _BucketShare] = {}
        self.elements: dict[tuple[tuple[int, ...], tuple[tuple[str, ...], ...]], float] = {}
        self.blocks: dict[str, float] = {}
        self.total = 0.0
        for tensor in setting.graph.parameters:
            size = prod(tensor.shape) * tensor.dtype.itemsize
            self.total += size
            self.blocks[block_of(tensor.name)] = self.blocks.get(block_of(tensor.name), 0.0) + size

    # -- values

    def way(
        self, sizes: tuple[int, ...], itemsize: int, source: Sharding, target: Sharding, share: float = 1.0
    ) -> tuple[float, float]:
        key = sizes, itemsize, source, target, share
        price = self.prices.get(key)
        if price is None:
            device = host = 0.0
            for cost in self.costs.value_steps(self.routes.of(sizes, source, target), itemsize, share):
                device, host = device + cost.seconds, host + cost.host_seconds
            price = self.prices[key] = (device, host)
        return price

    def gib(self, sizes: tuple[int, ...], itemsize: int, layout: Sharding) -> float:
        """Return the largest shard."""
        key = sizes, layout.splits
        found = self.elements.get(key)
        if found is None:
            cuts = (longest(size, axes, self.setting.axes) for size, axes in zip(sizes, layout.splits, strict=True))
            found = self.elements[key] = prod(cuts) / 2**30
        return found * itemsize

    # -- parameters

    def kept_copy(self, cut: TensorCut, held: StorageOption, want: Sharding, kept: bool) -> float:
        """Return the bytes of a gathered copy that lives until the backward, or until the optimizer steps."""
        lives = (kept and not held.again) or held.lasting
        return self.gib(cut.sizes, cut.itemsize, want) if lives and want.splits != held.layout.splits else 0.0

    def add_moved(
        self,
        sums: Floats,
        cut: TensorCut,
        held: StorageOption,
        want: Sharding,
        gathered_bytes: float,
        later: bool = False,
    ) -> None:
        """In a bucket, a parameter takes its share of what the fullest bucket takes: no bucket sends a byte in less.

        `gathered_bytes` is what could be gathered together.
        """
        forward, backward, gathers = self._moved(cut, held.layout, want, gathered_bytes)
        sums[Sum.FORWARD_ONCE if held.lasting else Sum.FORWARD_EACH] += forward[0]
        sums[Sum.HOST] += 0.0 if held.lasting else forward[1]
        deferred = later or held.defers(want)
        sums[Sum.BACKWARD_ONCE if deferred else Sum.BACKWARD_EACH] += backward[0]
        sums[Sum.HOST] += 0.0 if deferred else backward[1]
        if held.again and self.setting.trains and gathers:
            sums[Sum.BACKWARD_EACH] += forward[0]
            sums[Sum.HOST] += forward[1]

    def _moved(self, cut: TensorCut, stored: Sharding, want: Sharding, gathered_bytes: float) -> _BucketShare:
        key = cut, stored, want, gathered_bytes
        found = self.moved.get(key)
        if found is None:
            there, back = ways = self._ways_of(cut, stored, want)
            gathers, share = any(leg.kind == "all_gather" for leg, _ in there), 1.0
            if (there or back) and goes_in_bucket(*(tuple(StepKind(leg.kind) for leg, _ in way) for way in ways)):
                limit = min(float(BUCKET_BYTES), gathered_bytes if gathers else max(LEAST_BYTES, self.total / BUCKETS))
                share = min(1.0, max(leg.before * itemsize for leg, itemsize in (*there, *back)) / max(limit, 1.0))
            found = self.moved[key] = _BucketShare(self._sent(there, share), self._sent(back, share), gathers)
        return found

    def _ways_of(self, cut: TensorCut, stored: Sharding, want: Sharding) -> tuple[tuple[_Sent, ...], tuple[_Sent, ...]]:
        there = self.routes.of(cut.sizes, stored.value, want.value)
        back = self.routes.of(cut.sizes, want.gradient.value, stored.gradient.value) if cut.trained else ()
        dtype = self.setting.options.gradient_dtype
        reduced = cut.itemsize if dtype is None else dtype.itemsize
        return tuple((leg, cut.itemsize) for leg in there), tuple((leg, reduced) for leg in back)

    def _sent(self, way: tuple[_Sent, ...], share: float) -> tuple[float, float]:
        """Return link and host seconds of a share of a bucket."""
        seconds = host = 0.0
        for leg, itemsize in way if share else ():
            cost = self.costs.bucket_step(leg, leg.numel * itemsize / share)
            seconds, host = seconds + share * cost.seconds, host + share * cost.host_seconds
        return seconds, host

    def add_accumulated(self, sums: Floats, size: float) -> None:
        """Add what it takes to add a gradient, of so many bytes read and written, to that of earlier micro-batches."""
        prices = self.setting.prices
        seconds = seconds_of_bytes(size, prices.device)
        sums[Sum.DEVICE] += seconds
        sums[Sum.BACKWARD_ROOM] += seconds
        sums[Sum.HOST] += prices.launch if size else 0.0


def block_of(name: str) -> str:
    """Return the layer that a parameter is of, as buckets see it."""
    found = re.match(r"(.*?\.\d+)\.", name)
    return found[1] if found else ""
