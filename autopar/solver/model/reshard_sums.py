"""Prices of reshards as sums of the objective: of values, of parameters in their buckets, of their casts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from math import inf, prod
from typing import NamedTuple

import numpy as np

from autopar.cost.compute.byte_time import seconds_of_bytes
from autopar.cost.compute.op_time import FLOAT8_LAUNCHES
from autopar.cost.parameter_passes import CODING_LAUNCHES, coding_bytes
from autopar.ir.values import NamedTensor
from autopar.sharding.buckets import block_of
from autopar.sharding.options import sum_dtype
from autopar.sharding.reshard.reshard import ScaledReshards, StepKind, StepSize, goes_in_bucket
from autopar.sharding.reshard_insertion import gathered_in_float8
from autopar.sharding.sharding import Sharding, atoms_of, longest, routing_excess
from autopar.solver import Floats
from autopar.solver.candidates import StorageOption
from autopar.solver.model.bucket_shares import Joinable
from autopar.solver.model.objective import Sum
from autopar.solver.setting import PlanningProblem

# Seconds of a reshard on the device, beside it and on the host.
WaySeconds = tuple[float, float, float]
# A step, and the bytes of an element.
_Sent = tuple[StepSize, float]


class TensorCut(NamedTuple):
    """Properties of a tensor that its reshards depend on. A tuple, as tables are looked up by it."""

    sizes: tuple[int, ...]
    itemsize: float
    # It has a gradient.
    trained: bool
    # Bytes of an element while its gradient is reduced.
    reduced: int
    # Bytes of an element while it is gathered.
    gathered: float
    # It is a parameter that is stored or reduced in another dtype than that of the compute, or cast to float8.
    casts: bool
    # Bytes of a gradient's element that its copy into a bucket reads and writes: each time, and once in a step.
    copied: tuple[int, int] = (0, 0)
    # Atoms that axes with shares split by them.
    by_share: tuple[int, ...] = ()
    # Roles of the atoms of routed rows; empty for others.
    roles: str = ""
    # Each half of a micro-batch sends a part, while the other half computes.
    halved: bool = False
    # It is a weight that is cast to float8 apart from the products that read it.
    cast_apart: bool = False

    @classmethod
    def of(cls, tensor: NamedTensor, setting: PlanningProblem) -> TensorCut:
        atoms = atoms_of(tensor)
        dtype, precision = tensor.dtype, setting.options.precision
        trained, stored = tensor.requires_grad and setting.trains, tensor.stored_dtype(precision)
        reduced = precision.reduced(dtype) if tensor.kind == "param" else dtype
        apart = setting.prices.casts_apart(tensor.name)
        casts = apart or len({dtype, reduced, stored}) > 1
        # A cast into the buffer is no copy more, nor is a sum of micro-batches in another dtype.
        each = 2 * reduced.itemsize if tensor.kind == "param" and dtype == reduced else 0
        once = each if setting.options.micro_batches == 1 or sum_dtype(dtype) == dtype else 0
        return cls(
            atoms.sizes,
            tensor.element_bytes,
            trained,
            reduced.itemsize,
            1.0 if tensor.name in gathered_in_float8(setting.graph, precision) else tensor.element_bytes,
            casts,
            (each, once),
            atoms.by_share,
            atoms.roles,
            tensor.kind != "param" and setting.prices.is_halved(tensor.name),
            apart,
        )

    def steps(self, routes: ScaledReshards, source: Sharding, target: Sharding) -> tuple[StepSize, ...] | None:
        """Return the steps between two shardings of the tensor; None if none lead there."""
        return routes.of(self.sizes, source, target, self.by_share, self.roles)


class _BucketShare(NamedTuple):
    """Share of a parameter in its bucket: seconds of links and host, forward and backward."""

    forward: tuple[float, float]
    backward: tuple[float, float]
    gathers: bool
    in_float8: bool
    # Gradients are only summed, and copied into a buffer for it.
    is_sum: bool


class ReshardSums:
    """Reshards of one planning problem; each is priced once."""

    def __init__(self, setting: PlanningProblem) -> None:
        self.setting = setting
        self.costs = setting.prices.reshard_costs
        self.routes = ScaledReshards.on(setting.axes)
        self.prices: dict[Hashable, dict[tuple[Sharding, Sharding], WaySeconds]] = defaultdict(dict)
        self.moved: dict[tuple[TensorCut, Sharding, Sharding, Joinable], _BucketShare] = {}
        self.elements: dict[Hashable, float] = {}
        sizes: dict[str, list[float]] = {}
        for tensor in setting.graph.parameters:
            sizes.setdefault(block_of(tensor.name), []).append(prod(tensor.shape) * tensor.dtype.itemsize)
        self.used = tuple(setting.used)
        counts = [setting.axes[axis] for axis in self.used]
        known = {each: Joinable.gathered(each, counts) for each in {tuple(each) for each in sizes.values()}}
        self._gathered = {layer: known[tuple(each)] for layer, each in sizes.items()}
        trained = [tensor for tensor in setting.graph.parameters if tensor.requires_grad]
        self.summed = Joinable.summed([prod(one.shape) * one.dtype.itemsize for one in trained], counts)

    def gathered(self, tensor: NamedTensor) -> Joinable:
        """Return the parameters that may be gathered with a tensor: those of its layer, as buckets see it."""
        return self._gathered.get(block_of(tensor.name), self.summed)

    # -- values

    def way(self, cut: TensorCut, source: Sharding, target: Sharding, share: float = 1.0) -> WaySeconds:
        """Return the seconds of a reshard on the device, beside it and on the host; infinite if no steps lead there."""
        return self.priced(cut, share)(source, target)

    def priced(self, cut: TensorCut, share: float) -> Callable[[Sharding, Sharding], WaySeconds]:
        """Return the function from two shardings of a tensor to the seconds of `way`."""
        known = self.prices[cut.sizes, cut.by_share, cut.roles, cut.itemsize, cut.halved, share]
        steps_of = self.routes.between(cut.sizes, cut.by_share, cut.roles)

        def price(source: Sharding, target: Sharding) -> WaySeconds:
            pair = source, target
            found = known.get(pair)
            if found is None:
                found = known[pair] = self._seconds(cut, source, target, steps_of(source, target), share)
            return found

        return price

    def _seconds(
        self, cut: TensorCut, source: Sharding, target: Sharding, steps: tuple[StepSize, ...] | None, share: float
    ) -> WaySeconds:
        if not steps:
            return (inf if steps is None else 0.0), 0.0, 0.0
        device = beside = host = 0.0
        size = cut.itemsize * routing_excess(cut.roles, source, target)
        for cost in self.costs.value_steps(steps, size, share, 2 if cut.halved else 1):
            is_beside = cut.halved and not cost.step.local
            device, beside = device + cost.seconds * (not is_beside), beside + cost.seconds * is_beside
            host += cost.host_seconds
        return device, beside, host

    def gib(self, cut: TensorCut, layout: Sharding) -> float:
        """Return the largest shard."""
        key = cut.sizes, cut.by_share, layout.splits
        found = self.elements.get(key)
        if found is None:
            pairs = enumerate(zip(cut.sizes, layout.splits, strict=True))
            lengths = (longest(size, axes, self.setting.axes, i in cut.by_share) for i, (size, axes) in pairs)
            found = self.elements[key] = prod(lengths) / 2**30
        return found * cut.itemsize * (routing_excess(cut.roles, layout) if cut.roles else 1.0)

    # -- parameters

    def kept_copy(self, cut: TensorCut, held: StorageOption, want: Sharding, kept: bool) -> float:
        """Return the bytes of a gathered copy that lives until the backward, or until the optimizer steps."""
        lives = (kept and not held.again) or held.lasting
        if not lives or want.splits == held.layout.splits:
            return 0.0
        # In a call with micro-batches the gradient of the copy lives until it is reduced after the last one.
        copies = 2 if self.setting.call is not None and cut.trained and held.lasting else 1
        share = self.setting.stored_share if held.lasting else self.setting.saved_share
        return share * copies * self.gib(cut, want)

    def add_moved(
        self,
        sums: Floats,
        cut: TensorCut,
        held: StorageOption,
        want: Sharding,
        gathered: Joinable,
        later: bool = False,
    ) -> None:
        """In a bucket, a parameter takes its share of what the fullest bucket takes: no bucket sends a byte in less.

        `gathered` is what could be gathered together.
        """
        forward, backward, gathers, in_float8, is_sum = self._moved(cut, held.layout, want, gathered)
        sums[Sum.FORWARD_ONCE if held.lasting else Sum.FORWARD_EACH] += forward[0]
        sums[Sum.HOST_ONCE if held.lasting else Sum.HOST] += forward[1]
        deferred = later or held.defers(want)
        sums[Sum.BACKWARD_ONCE if deferred else Sum.BACKWARD_EACH] += backward[0]
        sums[Sum.HOST_ONCE if deferred else Sum.HOST] += backward[1]
        once = held.defers(want)
        if is_sum and cut.copied[once]:
            # The copy starts with those of the other parameters in its bucket; nothing hides that of a whole step.
            seconds = cut.copied[once] * self.gib(cut, want) * 2**30 / cut.itemsize / self.setting.prices.device.stream
            sums[[Sum.DEVICE_ONCE] if once else [Sum.DEVICE, Sum.BACKWARD_ROOM]] += seconds
        again = held.again and self.setting.trains and gathers
        if again:
            sums[Sum.BACKWARD_EACH] += forward[0]
            sums[Sum.HOST] += forward[1]
        if in_float8:
            size = coding_bytes(*(self.gib(cut, one) * 2**30 / cut.itemsize for one in (held.layout, want)))
            for room, once in ((Sum.FORWARD_ROOM, held.lasting), (Sum.BACKWARD_ROOM, False))[: 1 + again]:
                for key, value in self.cast_sums(size, room, once, CODING_LAUNCHES).items():
                    sums[key] += value

    def _moved(self, cut: TensorCut, stored: Sharding, want: Sharding, gathered: Joinable) -> _BucketShare:
        key = cut, stored, want, gathered
        found = self.moved.get(key)
        if found is None:
            there, back = ways = self._ways_of(cut, stored, want)
            gathers, fill, share, is_sum = any(leg.kind == "all_gather" for leg, _ in there), 1.0, 1.0, False
            in_float8 = any(itemsize < cut.itemsize for _, itemsize in there)
            if (there or back) and goes_in_bucket(*(tuple(StepKind(leg.kind) for leg, _ in way) for way in ways)):
                joined = gathered if gathers else self.summed
                sent = cut.itemsize * np.array(max(leg.before for leg, _ in (*there, *back)))
                fills = joined.fills(sent, cut.itemsize * prod(cut.sizes))
                fill, share = float(fills), float(joined.shares(fills, np.array(self._along(*there, *back))))
                is_sum = [leg.kind for leg, _ in back] == [StepKind.ALL_REDUCE.value]
            forward, backward = (self._sent(way, fill, share) for way in ways)
            found = self.moved[key] = _BucketShare(forward, backward, gathers, in_float8, is_sum)
        return found

    def _along(self, *way: _Sent) -> int:
        axes = {axis for leg, _ in way if not leg.local for axis in leg.axes}
        return sum(1 << self.used.index(axis) for axis in axes)

    def _ways_of(self, cut: TensorCut, stored: Sharding, want: Sharding) -> tuple[tuple[_Sent, ...], tuple[_Sent, ...]]:
        there = cut.steps(self.routes, stored.value, want.value)
        back = cut.steps(self.routes, want.gradient.value, stored.gradient.value) if cut.trained else ()
        assert there is not None, "parameters are stored in full"
        assert back is not None, "parameters are stored in full"
        # What is in no bucket is gathered as it is used.
        kinds, others = (tuple(StepKind(leg.kind) for leg in way) for way in (there, back))
        is_gather = StepKind.ALL_GATHER in kinds and goes_in_bucket(kinds, others)
        itemsize = cut.gathered if is_gather else cut.itemsize
        return tuple((leg, itemsize) for leg in there), tuple((leg, cut.reduced) for leg in back)

    def _sent(self, way: tuple[_Sent, ...], fill: float, share: float) -> tuple[float, float]:
        """Return link and host seconds of a part of a bucket, and of a share of its start."""
        seconds = host = 0.0
        for leg, itemsize in way if fill else ():
            full = self.costs.bucket_step(leg, leg.numel * itemsize / fill)
            start = full.seconds if share == fill else self.costs.bucket_step(leg, 1.0).seconds
            seconds += fill * (full.seconds - start) + share * start
            host += share * full.host_seconds
        return seconds, host

    def add_accumulated(self, sums: Floats, size: float) -> None:
        """Add what it takes to add a gradient, of so many bytes read and written, to that of earlier micro-batches."""
        prices = self.setting.prices
        seconds = seconds_of_bytes(size, prices.device)
        sums[Sum.DEVICE] += seconds
        sums[Sum.BACKWARD_ROOM] += seconds
        sums[Sum.HOST] += prices.launch if size else 0.0

    def add_casts(self, tensor: NamedTensor, sums: Floats, held: StorageOption, want: Sharding) -> None:
        """Add the casts of a parameter to the dtype of the compute, and of its gradient."""
        prices, trains = self.setting.prices, tensor.requires_grad and self.setting.trains

        def add(size: float, room: Sum, once: bool, launches: int = 1) -> None:
            for key, value in self.cast_sums(size, room, once, launches).items():
                sums[key] += value

        if prices.casts_apart(tensor.name):
            once = held.defers(want)
            for room in (Sum.FORWARD_ROOM, Sum.BACKWARD_ROOM)[: 1 + self.setting.trains]:
                add(prices.weight_cast_bytes(tensor.name, want), room, once, FLOAT8_LAUNCHES)
            if once:
                size = prices.float8_bytes(tensor.name, want)
                sums[Sum.KEPT_GIB] += self.setting.stored_share * size / 2**30

        size = prices.cast_bytes(tensor.name, held.layout)
        add(size, Sum.FORWARD_ROOM, held.lasting)
        if size and want.splits == held.layout.splits:
            # Autograd saves the copy.
            sums[Sum.KEPT_GIB] += self.setting.stored_share * self.gib(TensorCut.of(tensor, self.setting), want)
        if not trains:
            return
        deferred = held.defers(want)
        summed = self.setting.options.micro_batches > 1 and deferred
        size = prices.gradient_cast_bytes(tensor.name, want, held.layout, summed)
        add(size, Sum.BACKWARD_ROOM, deferred)
        if held.again:
            add(prices.cast_bytes(tensor.name, held.layout), Sum.BACKWARD_ROOM, once=False)

    def cast_sums(self, size: float, room: Sum, once: bool, launches: int = 1) -> dict[Sum, float]:
        """Return what a cast that reads and writes so many bytes adds to the sums."""
        prices, call = self.setting.prices, self.setting.call
        if not size:
            return {}
        seconds = seconds_of_bytes(size, prices.device)
        host = launches * prices.launch
        if not once:
            return {Sum.DEVICE: seconds, room: seconds, Sum.HOST: host}
        if call is not None and call.pipelining is not None and room is Sum.FORWARD_ROOM:
            return {Sum.FORWARD_ONCE: seconds}  # a stage casts while it waits for its first micro-batch
        return {Sum.DEVICE_ONCE: seconds, Sum.HOST_ONCE: host}


def kept_early(produced: Sharding, wanted: Sharding, size: Callable[[Sharding], float]) -> bool:
    """Return whether a value is kept as its only user takes it, and not as it is produced.

    Partial sums are: added up they are no larger, and whoever computes the user once more need not add them up again.
    """
    return produced.sums_to(wanted) and size(wanted) <= size(produced)


# An array for each sum, all of one shape; absent sums are zero.
