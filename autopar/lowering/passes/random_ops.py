"""Replace ops that draw random numbers by modules that draw for this rank, or refuse them by name.

A rank's numbers must not depend on the state of its generator: replicas draw the same, shards differ.

Input::

    y = dropout(x, 0.1, True)
Output::

    y = dropout_module(key, x)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from autopar.errors import AutoparError
from autopar.ir.fx_graphs import is_random
from autopar.ir.graph import NamedGraph
from autopar.ir.values import NamedNode
from autopar.lowering.modules.random_draws import DrawShard, DropoutMask, LocalRegion, OpSample, RreluSlopes
from autopar.lowering.modules.shard_ops import Dropout, DropoutAttention, Gamma, RandomOp, Rrelu, SampledOp
from autopar.mesh import SubMesh
from autopar.rules.call import arguments_by_name, takes_tensors
from autopar.rules.notation import Operand, Term
from autopar.sharding.choices import Choice
from autopar.sharding.sharding import MICRO, Atoms, Piece, piece

__all__ = ["DrawnOp", "RandomOps"]

aten = torch.ops.aten


@dataclass(frozen=True)
class DrawnOp:
    """Op of a graph that draws random numbers, with its splits; equal on all ranks."""

    name: str
    op: str
    choice: str
    # True if its shards can draw the numbers of one process.
    exact: bool


@dataclass(frozen=True)
class _PendingOp:
    """Op to be replaced: its call on this rank and on whole tensors, and the regions of its parts."""

    node: NamedNode
    source: Node
    local: Mapping[str, Any]
    whole: Mapping[str, Any]
    # Which arguments are tensors.
    tensors: tuple[str, ...]
    cut: Callable[[Iterable[Term]], LocalRegion]
    shard: Callable[[Iterable[Term]], DrawShard]
    device: torch.device
    differentiable: bool

    @property
    def output(self) -> Operand:
        operand = self.node.rule.outputs[0]
        assert operand is not None, self.node.name
        return operand

    @property
    def target(self) -> torch._ops.OpOverload:
        assert isinstance(self.source.target, torch._ops.OpOverload), self.source
        return self.source.target

    def value(self, name: str) -> Tensor:
        """Return a traced tensor, with the shape and strides of the whole one."""
        found: Tensor = self.whole[name].meta["val"]
        return found

    def kept(self, terms: tuple[Term, ...], rate: float, strides: tuple[int, ...] | None) -> DropoutMask:
        cut = self.cut(terms)
        found = strides or tuple(torch.empty(cut.shape, device="meta").stride())
        return DropoutMask(self.shard(terms), cut, found, rate, self.device)


def _dropout(op: _PendingOp) -> RandomOp:
    (name,) = op.tensors
    what = op.kept(op.output.terms, op.whole["p"], tuple(op.value(name).stride()))
    return Dropout(what, str(op.node.rule), op.target is aten.native_dropout.default)


def _rrelu(op: _PendingOp) -> RandomOp:
    terms = op.output.terms
    bounds = op.whole["lower"], op.whole["upper"]
    what = RreluSlopes(op.shard(terms), op.cut(terms), *bounds, op.value(op.tensors[0]).dtype, op.device)
    return Rrelu(what, str(op.node.rule), op.target is not aten.rrelu.default)


def _attention(op: _PendingOp) -> RandomOp:
    queries, keys = op.node.rule.operands[:2]
    assert queries is not None, op.node.name
    assert keys is not None, op.node.name
    *lead, rows, _ = op.output.terms

    def has(operand: Operand, position: int) -> bool:
        own = operand.terms[:-2]
        return len(own) >= -position and own[position] != ()

    # The values may have leading dims that the scores lack.
    scored = [term if has(queries, i) or has(keys, i) else () for i, term in enumerate(lead, -len(lead))]
    terms = (*scored, rows, keys.terms[-2])
    what = op.kept(terms, op.whole["dropout_p"], None)
    (first_row, _), *inner = op.cut([rows]).pieces  # split in the first alone where positions are counted
    first_row *= prod(length for _, length in inner)
    return DropoutAttention(what, str(op.node.rule), op.whole, list(op.tensors), first_row)


def _sampled(op: _PendingOp) -> OpSample:
    operands = dict(zip(takes_tensors(op.target), op.node.rule.operands, strict=True))
    parts = []
    for name in op.tensors:
        value, operand = op.value(name), operands[name]
        assert operand is not None, op.node.name
        parts.append((name, op.cut(operand.terms), tuple(value.stride())))
    given: list[dict[str, Any]] = []
    for arguments in (op.local, op.whole):
        plain = {name: None if name in op.tensors else _frozen(value) for name, value in arguments.items()}
        if not op.tensors and "device" in plain:
            plain["device"] = op.device
        given.append(plain)
    terms, local, whole = op.output.terms, *(tuple(one.items()) for one in given)
    dtype = op.source.meta["val"].dtype
    return OpSample(op.shard(terms), op.cut(terms), dtype, op.device, op.target, local, whole, tuple(parts))


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def _sample(op: _PendingOp) -> RandomOp:
    return SampledOp(_sampled(op), str(op.node.rule), op.differentiable)


def _gamma(op: _PendingOp) -> RandomOp:
    return Gamma(_sampled(op), str(op.node.rule))


def _flat(op: _PendingOp) -> RandomOp:
    """Replace an op that torch has no derivative of."""
    if op.differentiable:
        raise AutoparError(
            f"{op.node.name} ({op.node.op}) has no derivative, and its operand requires a gradient, at "
            f"{op.node.origin.source}: {op.node.origin.source_code}\nfix: detach() its operands"
        )
    return _sample(op)


_SAMPLES = """
rand.default randn.default randperm.default randint.default randint.low normal.float_float
rand_like.default randn_like.default randint_like.default randint_like.low_dtype
uniform.default normal_functional.default exponential.default cauchy.default log_normal.default geometric.default
random.default random.from random.to bernoulli.default bernoulli.p bernoulli.Tensor
normal.Tensor_float normal.float_Tensor normal.Tensor_Tensor multinomial.default poisson.default
"""

_MAKERS: dict[str, Callable[[_PendingOp], RandomOp]] = {
    **{f"aten.{name}": _sample for name in _SAMPLES.split()},
    "aten.dropout.default": _dropout,
    "aten.native_dropout.default": _dropout,
    "aten.scaled_dot_product_attention.default": _attention,
    "aten.rrelu.default": _rrelu,
    "aten.rrelu_with_noise_functional.default": _rrelu,
    "aten._standard_gamma.default": _gamma,
    "aten._sample_dirichlet.default": _flat,
    "aten.binomial.default": _flat,
}

# Ops that draw more or fewer numbers for other operands.
_BY_VALUE = frozenset(
    f"aten.{name}.default"
    for name in ("rrelu", "rrelu_with_noise_functional", "poisson", "binomial", "_standard_gamma", "_sample_dirichlet")
)


class RandomOps:
    """Drawing ops of one graph in order, on one rank; `replicas` of the graph must draw other numbers each."""

    def __init__(
        self,
        graph: NamedGraph,
        axes: SubMesh,
        coordinate: Mapping[str, int],
        device: torch.device,
        replicas: int = 1,
    ) -> None:
        self.axes = axes
        self.is_alone = prod(axes.values()) * replicas == 1
        self.coordinate = coordinate
        # Of the trace, and of the rank.
        self.home, self.device = graph.exported.device, device
        self.ops: list[DrawnOp] = []
        self._shards = 0

    def make(
        self, node: NamedNode, source: Node, choice: Choice, local: Mapping[str, Any], differentiable: bool
    ) -> RandomOp | None:
        """Return the module for an op under a choice if it draws anything; `local` are its arguments on this rank."""
        if self.is_alone:
            return None  # it draws as the model does
        if not node.rule.random:
            if is_random(source) and (node.source != "table" or not node.op.startswith("aten.")):
                raise _refused(node)
            return None
        if node.op not in _MAKERS:
            raise _refused(node)
        assert isinstance(source.target, torch._ops.OpOverload), source
        whole = arguments_by_name(source.target, source.args, source.kwargs)
        tensors = tuple(name for name, value in whole.items() if isinstance(value, Node))
        device = self._device(source)

        def cut(terms: Iterable[Term]) -> LocalRegion:
            return _cut(node, choice, terms, self.axes, self.coordinate)

        def shard(terms: Iterable[Term]) -> DrawShard:
            return self._shard(choice, terms)

        made = _MAKERS[node.op](_PendingOp(node, source, local, whole, tensors, cut, shard, device, differentiable))
        self._shards += made.what.shard.count
        made.varies = any(MICRO in axes for _, axes in choice.splits)
        exact = (made.what.shard.count == 1 or node.op not in _BY_VALUE) and not made.varies
        self.ops.append(DrawnOp(node.name, node.op, str(choice), exact))
        return made

    def _device(self, source: Node) -> torch.device:
        """Return the device of an op: that of the rank, unless the model has it elsewhere."""
        results = source.meta["val"]
        found: torch.device = (results if isinstance(results, Tensor) else results[0]).device
        follows = found == self.home or found.type in ("meta", self.device.type)
        return self.device if follows else found

    def _shard(self, choice: Choice, terms: Iterable[Term]) -> DrawShard:
        factors = {factor for term in terms for factor in term}
        used = {axis for (factor, _), axes in choice.splits if factor in factors for axis in axes}
        index = 0
        for axis, size in self.axes.items():
            if axis in used:
                index = index * size + self.coordinate[axis]
        return DrawShard(self._shards, index, prod(self.axes[axis] for axis in used))


def _cut(
    node: NamedNode, choice: Choice, terms: Iterable[Term], axes: SubMesh, coordinate: Mapping[str, int]
) -> LocalRegion:
    """Return the region of a rank's part of a tensor with these dims."""
    sizes: list[int] = []
    pieces: list[Piece] = []
    dims: list[int] = []
    for term in terms:
        before = len(sizes)
        for factor in term:
            for atom, size in enumerate(node.atoms.get(factor, (node.sizes[factor],))):
                split = choice.of((factor, atom))
                sizes.append(size)
                pieces.append(piece(size, split, axes, coordinate, (factor, atom) in node.by_share))
        dims.append(len(sizes) - before)
    return LocalRegion(Atoms(tuple(sizes), tuple(dims)), tuple(pieces))


def _refused(node: NamedNode) -> AutoparError:
    return AutoparError(
        f"{node.name} ({node.op}) draws random numbers, at {node.origin.source}: {node.origin.source_code}\n"
        "on several ranks replicas must draw the same and shards must not, which is not known of this op\n"
        "fix: draw outside of it, with dropout, torch.rand or torch.bernoulli (recurrent layers: dropout=0, one level "
        "each, and nn.Dropout between them); or call eval()"
    )
