"""Ops that draw random numbers, on shards: the numbers come from `draws`, the arithmetic around them is plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from autopar.choices import Choice
from autopar.errors import AutoparError
from autopar.layout.state import Atoms, Piece, nested
from autopar.rewrite.draws import Cut, Draw, Kept, Sampled, Shard, Slopes, draw, known
from autopar.rules.call import arguments_by_name, takes_tensors
from autopar.rules.notation import Operand, Term
from autopar.tracing.graph import NamedNode
from autopar.tracing.normalise import is_random

__all__ = ["Drawing", "Drawings", "DrawnOp"]

aten = torch.ops.aten


@dataclass(frozen=True)
class DrawnOp:
    """An op of a graph that draws random numbers, and how it is split; the same on all ranks."""

    name: str
    op: str
    choice: str
    exact: bool
    """Whether its shards can draw what one process draws."""


class Drawing(nn.Module):
    """An op that draws random numbers. It is called with the key of the call, then with the op's tensors."""

    def __init__(self, what: Draw, rule: str) -> None:
        super().__init__()
        self.what = what
        self.rule = rule
        self.draw = known(what)

    def extra_repr(self) -> str:
        shard = self.what.shard
        return f"shard {shard.index} of {shard.count}; rule {self.rule}"


class Dropout(Drawing):
    """`with_mask` as `native_dropout` gives it."""

    def __init__(self, what: Kept, rule: str, with_mask: bool) -> None:
        super().__init__(what, rule)
        self.scale = _scale(what.rate)
        self.with_mask = with_mask

    def forward(self, key: Tensor, x: Tensor) -> Any:
        kept = draw(key, (), self.draw)
        dropped = x * kept * self.scale
        return (dropped, kept) if self.with_mask else dropped


class Rrelu(Drawing):
    def forward(self, key: Tensor, x: Tensor) -> Tensor:
        slopes = draw(key, (x,), self.draw)
        return torch.where(x <= 0, x * slopes, x)


class Sample(Drawing):
    """An op whose result has no gradient, or one of zeros: what is drawn does not follow the operands smoothly."""

    def __init__(self, what: Sampled, rule: str, differentiable: bool) -> None:
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
        ctx.shapes = [(x.shape, x.dtype) if x.is_floating_point() else None for x in operands]
        return drawn.view_as(drawn)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        zeros = [None if kind is None else gradient.new_zeros(kind[0], dtype=kind[1]) for kind in ctx.shapes]
        return None, *zeros


class Gamma(Drawing):
    """The sample moves with its parameter as implicit differentiation says."""

    def forward(self, key: Tensor, alpha: Tensor) -> Tensor:
        drawn = draw(key, (alpha,), self.draw)
        if not alpha.requires_grad:
            return drawn
        slope: Tensor = aten._standard_gamma_grad.default(alpha.detach(), drawn)
        return drawn + slope * (alpha - alpha.detach())


class Attention(Drawing):
    """Attention that drops weights: `first_row` is where this rank's queries start."""

    def __init__(self, what: Kept, rule: str, arguments: Mapping[str, Any], names: list[str], first_row: int) -> None:
        super().__init__(what, rule)
        self.names = names
        self.first_row = first_row
        self.is_causal = bool(arguments["is_causal"])
        self.grouped = bool(arguments["enable_gqa"])
        self.factor = arguments["scale"]
        self.scale = _scale(what.rate)

    def forward(self, key: Tensor, *tensors: Tensor) -> Tensor:
        given = dict(zip(self.names, tensors, strict=True))
        queries, keys, values, mask = (given.get(name) for name in ("query", "key", "value", "attn_mask"))
        assert queries is not None, "attention has queries, keys and values"
        assert keys is not None, "attention has queries, keys and values"
        assert values is not None, "attention has queries, keys and values"
        dtype = queries.dtype
        if dtype in (torch.float16, torch.bfloat16):
            queries, keys, values = queries.float(), keys.float(), values.float()
        if self.grouped:
            keys = keys.repeat_interleave(queries.shape[-3] // keys.shape[-3], -3)
            values = values.repeat_interleave(queries.shape[-3] // values.shape[-3], -3)
        factor = 1 / sqrt(queries.shape[-1]) if self.factor is None else self.factor
        scores = (queries * factor) @ keys.transpose(-1, -2)
        if self.is_causal:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril(self.first_row)
            scores = scores.masked_fill(~seen, -torch.inf)
        if mask is None:
            weights = scores.softmax(-1)
        else:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
            weights = aten._safe_softmax.default(scores, -1)  # a row that sees nothing is zero
        kept = draw(key, (), self.draw)
        return ((weights * kept) @ (values * self.scale)).to(dtype)


def _scale(rate: float) -> float:
    return 0.0 if rate == 1 else 1 / (1 - rate)


# -- making them for a graph ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Op:
    """An op to be made: its call on this rank, the same on the whole tensors, and how its parts are cut."""

    node: NamedNode
    source: Node
    local: Mapping[str, Any]
    whole: Mapping[str, Any]
    tensors: tuple[str, ...]
    """Which arguments are tensors."""
    cut: Callable[[Iterable[Term]], Cut]
    shard: Callable[[Iterable[Term]], Shard]
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
        """A tensor of the trace: it has the shape and the strides of the whole one."""
        found: Tensor = self.whole[name].meta["val"]
        return found

    def kept(self, terms: tuple[Term, ...], rate: float, strides: tuple[int, ...] | None) -> Kept:
        cut = self.cut(terms)
        found = strides or tuple(torch.empty(cut.shape, device="meta").stride())
        return Kept(self.shard(terms), cut, found, rate, self.device)


def _dropout(op: _Op) -> Drawing:
    (name,) = op.tensors
    what = op.kept(op.output.terms, op.whole["p"], tuple(op.value(name).stride()))
    return Dropout(what, str(op.node.rule), op.target is aten.native_dropout.default)


def _rrelu(op: _Op) -> Drawing:
    terms = op.output.terms
    bounds = op.whole["lower"], op.whole["upper"]
    what = Slopes(op.shard(terms), op.cut(terms), *bounds, op.value(op.tensors[0]).dtype, op.device)
    return Rrelu(what, str(op.node.rule))


def _attention(op: _Op) -> Drawing:
    queries, keys = op.node.rule.operands[:2]
    assert queries is not None, op.node.name
    assert keys is not None, op.node.name
    *lead, rows, _ = op.output.terms

    def has(operand: Operand, position: int) -> bool:
        own = operand.terms[:-2]
        return len(own) >= -position and own[position] != ()

    # The values may have leading dims that the scores have not.
    scored = [term if has(queries, i) or has(keys, i) else () for i, term in enumerate(lead, -len(lead))]
    terms = (*scored, rows, keys.terms[-2])
    what = op.kept(terms, op.whole["dropout_p"], None)
    (first_row, _), *inner = op.cut([rows]).pieces  # split in the first alone where positions are counted
    first_row *= prod(length for _, length in inner)
    return Attention(what, str(op.node.rule), op.whole, list(op.tensors), first_row)


def _sampled(op: _Op) -> Sampled:
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
    return Sampled(op.shard(terms), op.cut(terms), dtype, op.device, op.target, local, whole, tuple(parts))


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def _sample(op: _Op) -> Drawing:
    return Sample(_sampled(op), str(op.node.rule), op.differentiable)


def _gamma(op: _Op) -> Drawing:
    return Gamma(_sampled(op), str(op.node.rule))


def _flat(op: _Op) -> Drawing:
    """An op that torch has no derivative of."""
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

_MAKERS: dict[str, Callable[[_Op], Drawing]] = {
    **{f"aten.{name}": _sample for name in _SAMPLES.split()},
    "aten.dropout.default": _dropout,
    "aten.native_dropout.default": _dropout,
    "aten.scaled_dot_product_attention.default": _attention,
    "aten.rrelu.default": _rrelu,
    "aten._standard_gamma.default": _gamma,
    "aten._sample_dirichlet.default": _flat,
    "aten.binomial.default": _flat,
}

_BY_VALUE = frozenset(
    f"aten.{name}.default" for name in ("rrelu", "poisson", "binomial", "_standard_gamma", "_sample_dirichlet")
)
"""Ops that draw more or fewer numbers for other operands."""


class Drawings:
    """The drawing ops of one graph, in order, on one rank of several."""

    def __init__(self, axes: Mapping[str, int], coordinate: Mapping[str, int], device: torch.device) -> None:
        self.axes = axes
        self.coordinate = coordinate
        self.device = device
        self.ops: list[DrawnOp] = []
        self._shards = 0

    def make(
        self, node: NamedNode, source: Node, choice: Choice, local: Mapping[str, Any], differentiable: bool
    ) -> Drawing | None:
        """The module for an op under a choice, if it draws anything; `local` are its arguments on this rank."""
        if prod(self.axes.values()) == 1:
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

        def cut(terms: Iterable[Term]) -> Cut:
            return _cut(node, choice, terms, self.axes, self.coordinate)

        def shard(terms: Iterable[Term]) -> Shard:
            return self._shard(choice, terms)

        made = _MAKERS[node.op](_Op(node, source, local, whole, tensors, cut, shard, device, differentiable))
        self._shards += made.what.shard.count
        exact = made.what.shard.count == 1 or node.op not in _BY_VALUE
        self.ops.append(DrawnOp(node.name, node.op, str(choice), exact))
        return made

    def _device(self, source: Node) -> torch.device:
        """Where an op works: where the model is, unless it was traced on a device of its own."""
        results = source.meta["val"]
        found: torch.device = (results if isinstance(results, Tensor) else results[0]).device
        return self.device if found.type in ("meta", self.device.type) else found

    def _shard(self, choice: Choice, terms: Iterable[Term]) -> Shard:
        factors = {factor for term in terms for factor in term}
        used = {axis for (factor, _), axes in choice.splits if factor in factors for axis in axes}
        index = 0
        for axis, size in self.axes.items():
            if axis in used:
                index = index * size + self.coordinate[axis]
        return Shard(self._shards, index, prod(self.axes[axis] for axis in used))


def _cut(
    node: NamedNode, choice: Choice, terms: Iterable[Term], axes: Mapping[str, int], coordinate: Mapping[str, int]
) -> Cut:
    """How a rank's part of a tensor with these dims lies in the whole one."""
    sizes: list[int] = []
    pieces: list[Piece] = []
    dims: list[int] = []
    for term in terms:
        before = len(sizes)
        for factor in term:
            for atom, size in enumerate(node.atoms.get(factor, (node.sizes[factor],))):
                split = choice.of((factor, atom))
                sizes.append(size)
                pieces.append(nested(size, [(axes[axis], coordinate[axis]) for axis in split]))
        dims.append(len(sizes) - before)
    return Cut(Atoms(tuple(sizes), tuple(dims)), tuple(pieces))


def _refused(node: NamedNode) -> AutoparError:
    return AutoparError(
        f"{node.name} ({node.op}) draws random numbers, at {node.origin.source}: {node.origin.source_code}\n"
        "on several ranks replicas must draw the same and shards must not, which is not known of this op\n"
        "fix: draw outside of it, with dropout, torch.rand or torch.bernoulli (recurrent layers: dropout=0, one level "
        "each, and nn.Dropout between them); or call eval()"
    )
