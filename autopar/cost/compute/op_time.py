"""Compute time of ops from the local shapes of a choice: products, attention, and all others by bytes.

The rule of an op gives the sizes of its product. A factor that two operands share and the result lacks is summed; a
factor of one operand and the result is a row or a column; a factor of all three is a batch. A convolution is a product
over its channels and kernel, and splitting a factor reduces one of the sizes. The backward of a product has a product
for each operand with a gradient. All other ops are limited by the bytes that they read and write. Saved operands and
gradients that an op passes on unchanged are found by running it (`autopar/ir/analysis/op_memory.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import ceil, prod
from operator import add

import torch

from autopar.cost.compute.attention_time import BACKWARD_PRODUCTS, AttentionShape, seconds_of_attention
from autopar.cost.compute.byte_time import seconds_of_bytes
from autopar.cost.compute.logit_bytes import logit_bytes
from autopar.cost.compute.matmul_time import MatmulShape
from autopar.cost.compute.product_time import seconds_of_product
from autopar.cost.compute.rates import peak_of
from autopar.cost.compute.ring_work import ring_extra
from autopar.cost.compute.unmasked_scores import unmasked_share
from autopar.cost.hardware.cluster import Device
from autopar.ir.analysis.contractions import (
    ATTENTIONS,
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
from autopar.rules.ops.loss_pieces import LINEAR_CROSS_ENTROPY
from autopar.sharding.assignment import OpAssignment
from autopar.sharding.choices import Choice, Site
from autopar.sharding.options import sum_dtype
from autopar.sharding.pipelining import PRODUCTS
from autopar.sharding.sharding import Sharding, atoms_of, longest, routing_excess

# Kernels that cast one operand to float8: its largest number, the scale, the scaled tensor, the cast, the layout.
FLOAT8_LAUNCHES = 10
# Bytes of an element meanwhile: the largest number is read, the scaled tensor written, cast, and laid out anew.
CAST_BYTES = 2 + (2 + 2) + (2 + 1) + (1 + 1)
# Reads and writes of scores where attention is written out: a mask (2), the softmax (2), the drawn numbers (2.25), and
# dropout (6.25). The gradient passes through all but the draw; that of a softmax reads two tensors.
SCORE_PASSES, SLOPE_PASSES = 12.5, 11.25


@dataclass(frozen=True)
class DirectionWork:
    """Work of one direction of one op on one device."""

    flops: float = 0.0
    bytes: float = 0.0
    seconds: float = 0.0
    # FLOPs at the peak rate of the dtype; 0 for an op that is limited by bytes.
    multiplying_seconds: float = 0.0
    # Kernels that the host launches.
    launches: int = 0

    @property
    def limited_by_bytes(self) -> bool:
        """Return True for an op that `torch.compile` may fuse with its neighbours."""
        return not self.multiplying_seconds

    def __mul__(self, times: float) -> DirectionWork:
        return DirectionWork(
            self.flops * times,
            self.bytes * times,
            self.seconds * times,
            self.multiplying_seconds * times,
            ceil(self.launches * times),
        )

    def __add__(self, other: DirectionWork) -> DirectionWork:
        return DirectionWork(
            self.flops + other.flops,
            self.bytes + other.bytes,
            self.seconds + other.seconds,
            self.multiplying_seconds + other.multiplying_seconds,
            self.launches + other.launches,
        )

    def __sub__(self, other: DirectionWork) -> DirectionWork:
        return DirectionWork(
            self.flops - other.flops,
            self.bytes - other.bytes,
            self.seconds - other.seconds,
            self.multiplying_seconds - other.multiplying_seconds,
            self.launches - other.launches,
        )


NO_WORK = DirectionWork()


@dataclass(frozen=True)
class OpWork:
    """Work of an op on one device: forward and backward."""

    forward: DirectionWork
    backward: DirectionWork
    # Of the backward of a product, the gradients of its weight and its bias.
    weights: DirectionWork = NO_WORK

    def __rmul__(self, times: int) -> OpWork:
        return OpWork(self.forward * times, self.backward * times, self.weights * times)


def op_work(
    graph: NamedGraph,
    node: NamedNode,
    op_assignment: OpAssignment,
    footprint: Footprint,
    axes: SubMesh,
    device: Device,
    casts: Collection[int] = (),
) -> OpWork:
    """Return the work of an op under an assignment, on the busiest rank.

    `casts`: places of the operands that a product in float8 casts itself; none for other ops.
    """
    return _OpTimer(graph, node, op_assignment, footprint, axes, device, casts).work()


def longest_of(node: NamedNode, site: Site, used: tuple[str, ...], axes: SubMesh, extent: int) -> int:
    """Return the local extent of a factor that axes split at one of its atoms."""
    if site in node.by_share and axes.shares is not None:
        size = node.atoms[site[0]][site[1]]
        return -(-extent * longest(size, used, axes, by_share=True) // size)
    return -(-extent // prod(axes[axis] for axis in used))


def share_of(node: NamedNode, choice: Choice, axes: SubMesh) -> float:
    """Return the share of an op's work that the priced rank has."""
    share = 1.0
    for (factor, atom), used in choice.splits:
        size = node.atoms[factor][atom]
        if (factor, atom) in node.by_share and axes.shares is not None:
            share *= longest(size, used, axes, by_share=True) / size
        else:
            share /= prod(axes[axis] for axis in used)
    return share


def local_bytes(graph: NamedGraph, name: str, layout: Sharding, axes: SubMesh) -> float:
    """Return the bytes of the largest shard of a tensor."""
    tensor = graph.tensors[name]
    atoms = atoms_of(tensor)
    return prod(layout.largest_sizes(atoms, axes)) * tensor.element_bytes * routing_excess(atoms.roles, layout)


def cast_work(elements: float, device: Device) -> DirectionWork:
    """Return the work of casting a tensor in bfloat16 to float8."""
    count = elements * CAST_BYTES
    seconds = seconds_of_bytes(count, device) + 3 * device.launch_seconds
    return DirectionWork(0.0, count, seconds, launches=FLOAT8_LAUNCHES)


def plain_name(op: str) -> str:
    """Return the name of an op in device files: `gelu` for `aten.gelu.default` and for the in-place `gelu_`."""
    return op.split(".")[1].strip("_") if "." in op else op


@dataclass(frozen=True)
class _OpTimer:
    """One op under one assignment, with methods for the ways in which ops are priced."""

    graph: NamedGraph
    node: NamedNode
    op_assignment: OpAssignment
    footprint: Footprint
    axes: SubMesh
    device: Device
    # Places of operands that a product casts to float8, beside gradients; none for a product in another dtype.
    casts: Collection[int]

    def work(self) -> OpWork:
        if all(alias is not None for alias in self.footprint.aliases) and self.node.outputs:
            # A view reads nothing; a device that is its own host still spends the overhead of an op.
            view = DirectionWork(seconds=self.device.op_seconds) if self.device.op_seconds else NO_WORK
            return OpWork(view, self._by_bytes(self._backward_bytes()) if self._backward_bytes() else view)
        if self.node.op in ATTENTIONS:
            return self._attention()
        steps = [(self._product(step), step) for step in contractions(self.node)]
        if self.node.op == str(LINEAR_CROSS_ENTROPY):
            return self._loss_in_pieces(*steps)
        if any(min(product.rows, product.columns) > 1 for product, _ in steps):
            return self._products(steps)
        name = plain_name(self.node.op)
        forward = self._by_bytes(self._forward_bytes(), self.device.forward_bytes_per_second.get(name))
        backward = self._by_bytes(self._backward_bytes(), self.device.backward_bytes_per_second.get(name))
        if self.node.op in RECURRENT:
            return OpWork(*map(add, (forward, backward), self._recurrent()))
        if steps and is_linear_in_both(self.node.rule, *(side[0] for side in steps[0][1].operands)):
            # Products by vectors have FLOPs, but their time is that of the bytes.
            flops = sum(product.flops for product, _ in steps)
            backward_flops = sum(product.flops * len(self._trained_sides(step)) for product, step in steps)
            return OpWork(forward + DirectionWork(flops), backward + DirectionWork(backward_flops))
        return OpWork(forward, backward)

    # -- sizes

    def _sizes(self) -> dict[str, int]:
        """Return the local extent of each factor."""
        sizes = dict(self.node.sizes)
        for site, used in self.op_assignment.choice.splits:
            if site[0] in sizes:
                sizes[site[0]] = longest_of(self.node, site, used, self.axes, sizes[site[0]])
        return sizes

    def _operand_bytes(self, position: int) -> float:
        name, layout = self.node.operands[position], self.op_assignment.operands[position]
        if name is None:
            return 0
        if layout is None:
            layout = Sharding.replicated(atoms_of(self.graph.tensors[name]))
        return local_bytes(self.graph, name, layout, self.axes)

    def _output_bytes(self, position: int) -> float:
        name, layout = self.node.outputs[position], self.op_assignment.produced[position]
        return 0 if name is None or layout is None else local_bytes(self.graph, name, layout, self.axes)

    def _share(self) -> float:
        """Return one rank's share of the tensors that an op allocates inside."""
        return share_of(self.node, self.op_assignment.choice, self.axes)

    def _dtype(self, position: int) -> torch.dtype:
        name = self.node.operands[position]
        assert name is not None, self.node.name
        return self.graph.tensors[name].dtype

    def _trained(self) -> tuple[int, ...]:
        """Return the operands that get a gradient."""
        names = self.node.operands if any(map(self._has_gradient, self.node.outputs)) else ()
        return tuple(i for i, name in enumerate(names) if self._has_gradient(name))

    def _has_gradient(self, name: str | None) -> bool:
        return name is not None and self.graph.tensors[name].requires_grad

    # -- by bytes

    def _forward_bytes(self) -> float:
        written = sum(self._output_bytes(i) for i, alias in enumerate(self.footprint.aliases) if alias is None)
        # A lookup by index reads the rows that it writes, not the whole table.
        looked_up = {factor for _, factor in self.node.rule.indices}
        read = 0.0
        for i, operand in enumerate(self.node.rule.operands[: len(self.node.operands)]):
            size = self._operand_bytes(i)
            read += min(size, written) if operand is not None and looked_up & set(operand.factors) else size
        # Temporaries are written once and read once.
        return read + written + (self.footprint.internal_bytes + 2 * self.footprint.forward_bytes) * self._share()

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
        # A gradient smaller than the result's (the weight of a norm) is a sum over the rest, in a second pass.
        return total + given + kept if summed else total

    def _by_bytes(self, count: float, bytes_per_second: float | None = None) -> DirectionWork:
        seconds = seconds_of_bytes(count, self.device, bytes_per_second)
        return DirectionWork(0.0, count, seconds, launches=int(count > 0))

    # -- products

    def _product(self, step: Contraction) -> MatmulShape:
        """Return the local sizes of one product."""
        sizes = self._sizes()
        for factor, _ in self.node.rule.halos:
            # A window op works on the smaller image: its input where it enlarges the image, else its result.
            if factor in sizes:
                sizes[factor] = min(sizes[factor], self._extent_read(step.operands[0][0], factor))

        def size(factors: frozenset[str]) -> int:
            return prod(sizes[factor] for factor in factors)

        # Splitting the experts leaves the rows: a rank multiplies the rows of other experts as zeros.
        experts = min(size(step.chosen), size(step.rows)) if step.chosen else 1
        rows = size(step.rows) / experts if experts > 1 else size(step.rows)
        if self.node.routed:
            # Each row is multiplied by the matrix of one group.
            rows = rows / self.node.routed * self._routing_excess()
        return MatmulShape(size(step.batch) * experts, rows, size(step.columns), size(step.summed))

    def _routing_excess(self) -> float:
        """Return the routed rows of the busiest rank over the mean."""
        name, layout = self.node.operands[0], self.op_assignment.operands[0]
        if name is None or layout is None:
            return 1.0
        return routing_excess(atoms_of(self.graph.tensors[name]).roles, layout)

    def _trained_sides(self, step: Contraction) -> list[int]:
        """Return the sides of a product with an operand that gets a gradient."""
        trained = set(self._trained())
        return [side for side in (0, 1) if trained & set(step.operands[side])]

    def _extent_read(self, position: int, factor: str) -> int:
        """Return the local extent of an operand's dim; the factor has the extent of the result's dim."""
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
        own = self._dtype(min(multiplied))
        dtype = torch.float8_e4m3fn if self.casts else own
        peak = peak_of(self.device, dtype)

        def work(product: MatmulShape, other: Collection[int]) -> DirectionWork:
            """Return the work of a product by some operands of the op."""
            one = self._product_work(product, dtype, peak)
            if not self.casts:
                return one
            sizes = [product.rows * product.reduction]
            if any(place in self.casts for place in other):
                sizes.append(product.reduction * product.columns)
            return sum((cast_work(product.batch * size, self.device) for size in sizes), one)

        forward = backward = weights = NO_WORK
        places = PRODUCTS.get(self.node.op)
        for product, step in steps:
            forward += work(product, step.operands[1])
            m, n, k = product.rows, product.columns, product.reduction
            of_experts = bool(self.node.routed or step.chosen)
            gradients = (MatmulShape(product.batch, m, k, n), MatmulShape(product.batch, k, n, m, of_experts))
            for side in self._trained_sides(step):
                one = work(gradients[side], step.operands[1 - side])
                backward += one
                weights += one if places is not None and places[1] in step.operands[side] else NO_WORK
        rest = [i for i in self._trained() if i not in multiplied and i not in self.footprint.passes]
        if rest:
            # The gradient of a bias is a sum that reads the gradient of the result once more.
            size = self._output_bytes(0) + sum(map(self._operand_bytes, rest))
            summed = self._by_bytes(size)
            backward, weights = backward + summed, weights + summed
        return OpWork(forward, backward, weights)

    def _product_work(self, product: MatmulShape, dtype: torch.dtype, peak: float) -> DirectionWork:
        alone = seconds_of_product(self.device, product, dtype)
        seconds = max(alone / self.device.sustained_fraction, self.device.launch_seconds)
        return DirectionWork(product.flops, product.bytes(dtype.itemsize), seconds, product.flops / peak, 1)

    # -- ops with more work than their rules show

    def _loss_in_pieces(self, step: tuple[MatmulShape, Contraction]) -> OpWork:
        """Return the work of a linear layer and its loss: its backward multiplies once more than that of the layer."""
        whole, factors = step
        moved = logit_bytes(self.graph, self.node)
        # Pieces of an equal number of rows; the last one may be shorter.
        rows = max(1, -(-whole.rows // moved.pieces))
        times = whole.rows / rows
        n, k = whole.columns, whole.reduction
        dtype = self._dtype(0)
        peak = peak_of(self.device, dtype)

        def by_bytes(count: float, kernels: int) -> DirectionWork:
            work = self._by_bytes(count)
            return DirectionWork(0.0, count, max(work.seconds, kernels * self.device.launch_seconds), launches=kernels)

        again = self._product_work(MatmulShape(1, rows, n, k), dtype, peak)
        forward = again + by_bytes(rows * n * moved.forward, moved.forward_kernels)
        backward = again + by_bytes(rows * n * moved.backward, moved.backward_kernels)
        trained = self._trained_sides(factors)
        if 0 in trained:
            backward += self._product_work(MatmulShape(1, rows, k, n), dtype, peak)
        if 1 in trained:
            backward += self._product_work(MatmulShape(1, k, n, rows), dtype, peak)
            backward += by_bytes(n * k * moved.of_weight, 1)
        return OpWork(forward * times, backward * times if trained else NO_WORK)

    def _attention(self) -> OpWork:
        """Return the work of fused attention, which never writes the scores."""
        sizes, rule = self._sizes(), self.node.rule
        # Where keys are split, those of all ranks pass by.
        sizes["t"] = self.node.sizes.get("t", 1)
        query, value = (factors_of(operand) for operand in (rule.operands[0], rule.operands[2]))
        output = factors_of(rule.outputs[0])
        rows = prod(sizes[factor] for factor in output & query)
        keys = prod(sizes[factor] for factor in value - output - {"v"})
        width = sum(sizes[factor] for factor in (query | value) - (output & query) - (value - output))
        heads = max(1, rows // sizes.get("s", 1))
        if rule.random and prod(self.axes.values()) > 1:
            return self._written_attention(heads, sizes.get("s", 1), keys, width)
        share = unmasked_share(self.node, sizes)
        flops = 2.0 * rows * keys * width * share
        moved = sum(map(self._operand_bytes, range(len(self.node.operands)))) + self._output_bytes(0)
        ring = ring_extra(self.node, self.op_assignment.choice, self.axes)
        moved += sum(map(self._operand_bytes, (1, 2))) * ring.more_blocks
        merged = seconds_of_bytes(self._output_bytes(0) / self._dtype(0).itemsize * ring.merged_bytes, self.device)
        dtype = self._dtype(0)
        peak = peak_of(self.device, dtype)
        queries = sizes.get("s", 1)
        shape = AttentionShape(heads, queries, keys * share, width, share < 1, moved, ring.calls)
        works = []
        both = seconds_of_attention(self.device, shape, dtype)
        for times, alone in zip((1.0, BACKWARD_PRODUCTS), both, strict=True):
            # A call of the kernel lasts a launch at least; merges are kernels of their own.
            seconds = max(alone, ring.calls * self.device.launch_seconds) + merged
            works.append(DirectionWork(times * flops, moved * times, seconds, times * flops / peak, ring.calls))
        return OpWork(works[0], works[1] if self._trained() else NO_WORK)

    def _written_attention(self, heads: int, queries: int, keys: int, width: int) -> OpWork:
        """Return the work of attention with dropout, which several ranks write out; `width`: of keys and of values."""
        dtype = sum_dtype(self._dtype(0))
        product = self._product_work(MatmulShape(heads, queries, keys, width), dtype, peak_of(self.device, dtype))
        scores = heads * queries * keys * dtype.itemsize
        forward, backward = (
            product * times + self._by_bytes(passes * scores)
            for times, passes in ((1, SCORE_PASSES), (2, SLOPE_PASSES))
        )
        return OpWork(forward, backward if self._trained() else NO_WORK)

    def _recurrent(self) -> tuple[DirectionWork, DirectionWork]:
        """Return the work of the weight matrices: once for each token, and twice in the backward."""
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
