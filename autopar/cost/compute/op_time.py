"""The time that ops compute, from the local shapes of a choice: products, attention, and the rest by bytes.

What an op multiplies follows from its rule: a factor that two operands share and the result lacks is summed over, those
of one operand and the result are rows or columns, those of both are a batch. So a convolution is a product over its
channels and kernel, and splitting any factor makes any of its sizes smaller. The backward of a product is a product for
each operand that has a gradient. All other ops are limited by the bytes that they read and write; what an op keeps for
its backward and which gradients it passes on as they are is seen by running it (`autopar/ir/analysis/op_memory.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import add

import torch

from autopar.cost.compute.matmul_time import MatmulShape, product_seconds
from autopar.cost.compute.rates import peak_of
from autopar.cost.hardware.cluster import AttentionRates, Device
from autopar.ir.analysis.contractions import (
    ATTENTION,
    RECURRENT,
    Contraction,
    contractions,
    factors_of,
    is_linear_in_both,
)
from autopar.ir.analysis.op_memory import Footprint
from autopar.ir.graph import NamedGraph
from autopar.ir.values import NamedNode
from autopar.mesh import SubMesh
from autopar.sharding.assignment import OpAssignment
from autopar.sharding.atoms import atoms_of
from autopar.sharding.choices import Choice
from autopar.sharding.sharding import Sharding

__all__ = ["NOTHING", "DirectionWork", "OpWork", "local_bytes", "op_work", "plain_name", "seconds_of_bytes"]

BACKWARD_PRODUCTS = 2.5
"""FLOPs of the backward of fused attention over its forward's: five products, of which one makes the scores again."""


@dataclass(frozen=True)
class DirectionWork:
    """One direction of one op on one device."""

    flops: float = 0.0
    bytes: float = 0.0
    seconds: float = 0.0
    multiplying_seconds: float = 0.0
    """What the FLOPs take at the peak rate of the dtype; none where only what is read and written counts."""

    launches: int = 0
    """Kernels that the host launches for it."""

    @property
    def limited_by_bytes(self) -> bool:
        """Whether `torch.compile` may join it with its neighbours."""
        return not self.multiplying_seconds

    def __add__(self, other: DirectionWork) -> DirectionWork:
        return DirectionWork(
            self.flops + other.flops,
            self.bytes + other.bytes,
            self.seconds + other.seconds,
            self.multiplying_seconds + other.multiplying_seconds,
            self.launches + other.launches,
        )


NOTHING = DirectionWork()


@dataclass(frozen=True)
class OpWork:
    forward: DirectionWork
    backward: DirectionWork


def op_work(
    graph: NamedGraph,
    node: NamedNode,
    op_assignment: OpAssignment,
    footprint: Footprint,
    axes: SubMesh,
    device: Device,
) -> OpWork:
    """What an op computes under a choice, on the rank that has most to do."""
    return _OpTimer(graph, node, op_assignment, footprint, axes, device).work()


def local_bytes(graph: NamedGraph, name: str, layout: Sharding, axes: SubMesh) -> int:
    """What the rank with the largest shard holds of a tensor."""
    tensor = graph.tensors[name]
    return prod(layout.largest_sizes(atoms_of(tensor), axes)) * tensor.dtype.itemsize


def seconds_of_bytes(count: float, device: Device, bytes_per_second: float | None = None) -> float:
    """An op that reads and writes so many bytes; one that does nothing takes no time."""
    if not count:
        return 0.0
    return device.op_seconds + max(device.launch_seconds, count / (bytes_per_second or device.stream))


def plain_name(op: str) -> str:
    """`gelu` of `aten.gelu.default`, and of the `gelu_` that writes in place: as devices call it."""
    return op.split(".")[1].strip("_") if "." in op else op


@dataclass(frozen=True)
class _OpTimer:
    graph: NamedGraph
    node: NamedNode
    op_assignment: OpAssignment
    footprint: Footprint
    axes: SubMesh
    device: Device

    def work(self) -> OpWork:
        if all(alias is not None for alias in self.footprint.aliases) and self.node.outputs:
            return OpWork(
                self._view(), self._by_bytes(self._backward_bytes()) if self._backward_bytes() else self._view()
            )
        if self.node.op == ATTENTION:
            return self._attention()
        steps = [(self._product(step), step) for step in contractions(self.node)]
        if any(min(product.rows, product.columns) > 1 for product, _ in steps):
            return self._products(steps)
        name = plain_name(self.node.op)
        forward = self._by_bytes(self._forward_bytes(), self.device.forward_bytes_per_second.get(name))
        backward = self._by_bytes(self._backward_bytes(), self.device.backward_bytes_per_second.get(name))
        if self.node.op in RECURRENT:
            return OpWork(*map(add, (forward, backward), self._recurrent()))
        if steps and is_linear_in_both(self.node.rule, *(side[0] for side in steps[0][1].operands)):
            flops = sum(product.flops for product, _ in steps)  # by vectors: limited by what is read
            taken = sum(product.flops * len(self._made(step)) for product, step in steps)
            return OpWork(forward + DirectionWork(flops), backward + DirectionWork(taken))
        return OpWork(forward, backward)

    # -- sizes

    def _sizes(self) -> dict[str, int]:
        """The local extent of each factor."""
        return {
            factor: _local_extent(self.node, factor, self.op_assignment.choice, self.axes) for factor in self.node.sizes
        }

    def _operand_bytes(self, position: int) -> int:
        name, layout = self.node.operands[position], self.op_assignment.operands[position]
        if name is None:
            return 0
        if layout is None:
            layout = Sharding.replicated(atoms_of(self.graph.tensors[name]))
        return local_bytes(self.graph, name, layout, self.axes)

    def _output_bytes(self, position: int) -> int:
        name, layout = self.node.outputs[position], self.op_assignment.produced[position]
        return 0 if name is None or layout is None else local_bytes(self.graph, name, layout, self.axes)

    def _share(self) -> float:
        """The share of what an op keeps inside that one rank keeps."""
        return 1 / prod(self.axes[axis] for axis in self.op_assignment.choice.axes)

    def _dtype(self, position: int) -> torch.dtype:
        name = self.node.operands[position]
        assert name is not None, self.node.name
        return self.graph.tensors[name].dtype

    def _trained(self) -> tuple[int, ...]:
        """The operands that get a gradient."""
        made = any(name is not None and self.graph.tensors[name].requires_grad for name in self.node.outputs)
        names = self.node.operands if made else ()
        return tuple(i for i, name in enumerate(names) if name is not None and self.graph.tensors[name].requires_grad)

    # -- by bytes

    def _forward_bytes(self) -> float:
        written = sum(self._output_bytes(i) for i, alias in enumerate(self.footprint.aliases) if alias is None)
        inside = (self.footprint.internal_bytes + 2 * self.footprint.forward_bytes) * self._share()
        return self._read(written) + written + inside

    def _read(self, written: float) -> float:
        """What is looked up by position is read as far as it is written."""
        looked_up = {factor for _, factor in self.node.rule.indices}
        total = 0.0
        for i, operand in enumerate(self.node.rule.operands[: len(self.node.operands)]):
            size = self._operand_bytes(i)
            total += min(size, written) if operand is not None and looked_up & set(operand.factors) else size
        return total

    def _backward_bytes(self) -> float:
        made = [i for i in self._trained() if i not in self.footprint.passes]
        if not made:
            return 0.0
        given = sum(self._output_bytes(i) for i, name in enumerate(self.node.outputs) if self._has_gradient(name))
        kept = sum(map(self._operand_bytes, self.footprint.keeps)) + sum(
            map(self._output_bytes, self.footprint.keeps_outputs)
        )
        inside = (self.footprint.internal_bytes + 2 * self.footprint.backward_bytes) * self._share()
        total = given + kept + inside + sum(map(self._operand_bytes, made))
        summed = any(self._operand_bytes(i) < given for i in made) and not self.node.rule.indices
        # What is smaller than the result (the weight of a norm) is summed over the rest in a pass of its own.
        return total + given + kept if summed else total

    def _has_gradient(self, name: str | None) -> bool:
        return name is not None and self.graph.tensors[name].requires_grad

    def _by_bytes(self, count: float, bytes_per_second: float | None = None) -> DirectionWork:
        return DirectionWork(
            0.0, count, seconds_of_bytes(count, self.device, bytes_per_second), launches=int(count > 0)
        )

    def _view(self) -> DirectionWork:
        """Nothing is read; a device that is its own host takes its time all the same."""
        return DirectionWork(seconds=self.device.op_seconds) if self.device.op_seconds else NOTHING

    # -- products

    def _product(self, step: Contraction) -> MatmulShape:
        """The local sizes of one product."""
        sizes = self._sizes()
        for factor, _ in self.node.rule.halos:
            # Windows that grow an image do their work where they read, others where they write.
            if factor in sizes:
                sizes[factor] = min(sizes[factor], self._extent_read(step.operands[0][0], factor))

        def size(factors: frozenset[str]) -> int:
            return prod(sizes[factor] for factor in factors)

        # All rows are multiplied wherever the experts lie: a rank takes those of others as zeros of its own.
        experts = min(size(step.chosen), size(step.rows)) if step.chosen else 1
        rows = size(step.rows) / experts if experts > 1 else size(step.rows)
        return MatmulShape(size(step.batch) * experts, rows, size(step.columns), size(step.summed))

    def _made(self, step: Contraction) -> list[int]:
        """The sides of a product of which some operand gets a gradient."""
        trained = set(self._trained())
        return [side for side in (0, 1) if trained & set(step.operands[side])]

    def _extent_read(self, position: int, factor: str) -> int:
        """The local extent of a dim of an operand, where the factor's own is that of the result."""
        name, operand = self.node.operands[position], self.node.rule.operands[position]
        assert name is not None, self.node.name
        assert operand is not None, self.node.name
        if (factor,) not in operand.terms:
            return self.node.sizes[factor]
        whole = self.graph.tensors[name].shape[operand.terms.index((factor,))]
        count = prod(self.axes[axis] for axis in self.op_assignment.choice.of((factor, 0)))
        return -(-whole // count)

    def _products(self, steps: Sequence[tuple[MatmulShape, Contraction]]) -> OpWork:
        multiplied = {i for _, step in steps for side in step.operands for i in side}
        dtype = self._dtype(min(multiplied))
        peak = peak_of(self.device, dtype)

        def work(product: MatmulShape) -> DirectionWork:
            seconds = product_seconds(product, dtype.itemsize, self.device.matrix, peak, self.device.stream)
            seconds /= self.device.sustained_fraction
            size = product.bytes(dtype.itemsize)
            return DirectionWork(product.flops, size, max(seconds, self.device.launch_seconds), product.flops / peak, 1)

        forward = backward = NOTHING
        for product, step in steps:
            forward += work(product)
            m, n, k = product.rows, product.columns, product.reduction
            gradients = (MatmulShape(product.batch, m, k, n), MatmulShape(product.batch, k, n, m))
            backward = sum((work(gradients[side]) for side in self._made(step)), backward)
        rest = [i for i in self._trained() if i not in multiplied and i not in self.footprint.passes]
        if rest:  # a bias: the gradient of the result is read once more
            size = self._output_bytes(0) + sum(map(self._operand_bytes, rest))
            backward += self._by_bytes(size)
        return OpWork(forward, backward)

    # -- ops that do more than their rules say

    def _attention(self) -> OpWork:
        """Fused attention: the scores are never written. Where a mask is given all of them are computed."""
        sizes, rule = self._sizes(), self.node.rule
        query, value = (factors_of(operand) for operand in (rule.operands[0], rule.operands[2]))
        output = factors_of(rule.outputs[0])
        rows = prod(sizes[factor] for factor in output & query)
        keys = prod(sizes[factor] for factor in value - output - {"v"})
        width = sum(sizes[factor] for factor in (query | value) - (output & query) - (value - output))
        heads = max(1, rows // sizes.get("s", 1))
        share = self._causal_share(sizes) if "s" in dict(rule.lowerings) else 1.0
        flops = 2.0 * rows * keys * width * share
        moved = sum(map(self._operand_bytes, range(len(self.node.operands)))) + self._output_bytes(0)
        rates = self.device.attention
        peak = peak_of(self.device, self._dtype(0))
        works = []
        forward = rates.forward_fraction * (rates.causal_fraction if share < 1 else 1.0)
        forward *= width / (width + 2 * rates.softmax)
        backward = rates.backward_fraction * (rates.causal_backward_fraction if share < 1 else 1.0)
        for times, reached in ((1.0, forward), (BACKWARD_PRODUCTS, backward)):
            rate = peak * reached * self.device.sustained_fraction * self._filled(rates, heads, sizes.get("s", 1))
            size = moved * times
            seconds = max(times * flops / rate, seconds_of_bytes(size, self.device))
            works.append(DirectionWork(times * flops, size, seconds, times * flops / peak, 1))
        return OpWork(works[0], works[1] if self._trained() else NOTHING)

    def _causal_share(self, sizes: Mapping[str, int]) -> float:
        """Of the scores of the busiest shard: query `i` sees keys `0` to `i`, of those that there are."""
        rows, total = sizes["s"], self.node.sizes["s"]
        keys = self.node.sizes.get("t", total)
        if not rows or not keys:
            return 1.0
        stop = total // rows * rows  # what is left over is a shorter shard
        seen = max(_seen(stop - rows, stop, keys), _seen(stop, total, keys))
        return seen / (rows * keys)

    def _filled(self, rates: AttentionRates, heads: int, rows: int) -> float:
        """The share of the processors that have something to do."""
        if self.device.matrix is None:
            return 1.0
        blocks = heads * -(-rows // rates.rows)
        waves = -(-blocks // self.device.matrix.processors)
        return blocks / (waves * self.device.matrix.processors) if waves == 1 else 1.0

    def _recurrent(self) -> tuple[DirectionWork, DirectionWork]:
        """Every weight matrix once for each token, and twice in the backward."""
        output = self.graph.tensors[self.node.outputs[0] or ""]
        tokens = self._output_bytes(0) / output.dtype.itemsize / output.shape[-1]
        weights = [self.graph.tensors[name].shape for name in self.node.operands[RECURRENT[self.node.op] :] if name]
        flops = 2.0 * tokens * sum(prod(shape) for shape in weights if len(shape) == 2)
        seconds = flops / peak_of(self.device, self._dtype(0))
        forward, backward = (
            DirectionWork(times * flops, 0.0, times * seconds, times * seconds)
            for times in (1, 2 if self._trained() else 0)
        )
        return forward, backward


def _seen(start: int, stop: int, keys: int) -> int:
    """How many pairs of a query from `start` to `stop` and a key it sees there are."""
    edge = max(start, min(stop, keys))  # from here on each sees all keys
    return (start + 1 + edge) * (edge - start) // 2 + (stop - edge) * keys


def _local_extent(node: NamedNode, factor: str, choice: Choice, axes: SubMesh) -> int:
    extent = node.sizes[factor]
    for (name, _), used in choice.splits:
        if name == factor:
            extent = -(-extent // prod(axes[axis] for axis in used))
    return extent
