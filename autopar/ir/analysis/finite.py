"""Finite values of a graph, and thereby the ops that a partial sum may pass through.

A partial sum that passes through an op is multiplied term by term. If a factor is infinite, or a divisor zero, terms of
opposite sign yield NaN where the sum would yield infinity. So the graph must prove that the other operands of such an
op are finite. Constants are checked; parameters and buffers are assumed finite; float inputs are not. Results follow
from their op: a softmax is bounded, a sum of finite values is finite. Overflow of finite products is ignored.
"""

from __future__ import annotations

from cmath import isfinite
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from autopar.ir.exported import Exported
from autopar.ir.values import NamedNode, NamedTensor
from autopar.rules.call import arguments_by_name


def _ops(names: str) -> frozenset[str]:
    return frozenset(names.split())


# The tables list ops without overload. These are never infinite if numbers and all operands but the first are finite:
# an infinite first operand yields NaN at most.
_BOUNDED = _ops(
    "softmax _softmax sigmoid hardsigmoid tanh sin cos erf erfc sign atan relu6 hardtanh one_hot zeros ones eye arange "
    "zeros_like ones_like new_zeros new_ones rand randn bernoulli layer_norm native_layer_norm rms_norm "
    "_fused_rms_norm group_norm nan_to_num"
)
# Finite, and of one sign, if all operands are: these ops move, select or average.
_MOVING = _ops(
    "view reshape _unsafe_view permute transpose t slice select narrow expand repeat cat stack split split_with_sizes "
    "chunk unbind index gather index_select embedding squeeze unsqueeze flatten unflatten unfold clone detach alias "
    "contiguous _to_copy to type_as topk sort flip roll diagonal amax amin max maximum mean sum view_as_real "
    "expand_as lift_fresh lift_fresh_copy getitem movedim fold unfold"
)
# Finite if all operands and numbers are, short of overflow.
_CARRYING = _MOVING | _ops(
    "add sub rsub mul multiply neg abs absolute matmul mm bmm addmm baddbmm linear conv1d conv2d conv3d convolution "
    "conv_transpose1d conv_transpose2d conv_transpose3d einsum dot mv outer tensordot bilinear min minimum cumsum "
    "where masked_fill clamp clamp_min clamp_max relu gelu silu elu leaky_relu softplus selu mish square sqrt pad "
    "constant_pad_nd dropout native_dropout scatter scatter_add index_add index_copy index_put tril triu var std norm "
    "linalg_vector_norm addcmul lerp round floor ceil trunc remainder meshgrid avg_pool2d max_pool2d "
    "adaptive_avg_pool2d upsample_nearest2d cross linalg_cross glu prelu view_as_complex real imag conj expert_rows "
    "_grouped_mm grouped_mm_fallback full full_like new_full scalar_tensor linspace logsumexp log_sigmoid "
    "hardswish log_softmax _log_softmax"
)
# Not negative, whatever the operands.
_SQUARES = _ops(
    "softmax _softmax sigmoid hardsigmoid relu relu6 abs absolute square exp sqrt softplus var std norm "
    "linalg_vector_norm one_hot zeros ones zeros_like ones_like"
)
# A cast may turn a small positive number into zero.
_CASTS = frozenset(("_to_copy", "to", "type_as"))
_DIVIDING = _ops("div divide true_divide addcdiv")
# The operands outside of the sum are no factors: they select, enter through a softmax, or give a shape.
_LENT = _ops(
    "where scaled_dot_product_attention folded_attention document_attention type_as to view_as reshape_as expand_as "
    "new_zeros new_empty layer_norm native_layer_norm rms_norm _fused_rms_norm group_norm masked_fill fill"
)


def passable_sums(
    nodes: Iterable[NamedNode], tensors: Mapping[str, NamedTensor], exported: Exported
) -> Mapping[str, frozenset[frozenset[int]]]:
    """Return for each op the groups of operands that may be partial sums together."""
    values = _Values(tensors, exported)
    found = {}
    for node in nodes:
        groups = (frozenset(group) for group in node.rule.linear)
        found[node.name] = frozenset(group for group in groups if values.can_pass(node, group))
        values.add(node)
    return found


class _Values:
    """Names of the values that are known to be finite, not negative (`unsigned`) and above zero (`positive`)."""

    def __init__(self, tensors: Mapping[str, NamedTensor], exported: Exported) -> None:
        self.tensors = tensors
        self.sources = {node.name: node for node in exported.graph_module.graph.nodes}
        self.finite: set[str] = set()
        self.unsigned: set[str] = set()
        self.positive: set[str] = set()
        self.makers: dict[str, NamedNode] = {}
        for tensor in tensors.values():
            data = exported.constants.get(tensor.name) if tensor.kind == "constant" else None
            known = isinstance(data, torch.Tensor) and not data.is_meta and bool(data.isfinite().all())
            if known or tensor.kind in ("param", "buffer") or _is_whole(tensor.dtype):
                self.finite.add(tensor.name)

    def can_pass(self, node: NamedNode, group: frozenset[int]) -> bool:
        """Return True if the op of each term of a sum adds up to the op of the sum."""
        name, arguments = _plain(node.op), self._arguments(node)
        if not _numbers_finite(arguments):
            return False
        others = [operand for i, operand in enumerate(node.operands) if i not in group and operand is not None]
        if name in _DIVIDING:
            number = arguments.get("other")
            return number != 0 and self.positive.issuperset(others)
        return name in _LENT or self.finite.issuperset(others)

    def add(self, node: NamedNode) -> None:
        """Classify the results of an op; its operands must have been added before."""
        name, arguments = _plain(node.op), self._arguments(node)
        operands = [operand for operand in node.operands if operand is not None]
        made = [output for output in node.outputs if output is not None]
        self.makers.update(dict.fromkeys(made, node))
        if _numbers_finite(arguments) and self._is_finite(name, operands, arguments):
            self.finite.update(made)
        if self._is_positive(name, operands, arguments):
            self.positive.update(made)
            self.unsigned.update(made)
        elif self._is_unsigned(name, operands, arguments):
            self.unsigned.update(made)

    def _arguments(self, node: NamedNode) -> dict[str, Any]:
        source = self.sources[node.node]
        if not isinstance(source.target, torch._ops.OpOverload):
            return {}
        return arguments_by_name(source.target, source.args, source.kwargs)

    def _is_finite(self, name: str, operands: list[str], arguments: Mapping[str, Any]) -> bool:
        if name in _BOUNDED:
            return self.finite.issuperset(operands[1:])
        if name in ("scaled_dot_product_attention", "folded_attention", "document_attention"):
            # The softmax bounds the weights, whatever the scores.
            return operands[2] in self.finite
        if name in ("clamp", "clip") and None not in (arguments.get("min"), arguments.get("max")):
            return not any(isinstance(arguments[end], Node) for end in ("min", "max"))
        if name in _CARRYING:
            return self.finite.issuperset(operands)
        if name == "pow":
            exponent = arguments.get("exponent")
            if not isinstance(exponent, int | float) or operands[0] not in self.finite:
                return False
            return exponent >= 0 or operands[0] in self.positive
        if name in ("rsqrt", "reciprocal", "log"):
            return operands[0] in self.positive and operands[0] in self.finite
        if name in _DIVIDING:
            divisors = operands[1:] if name != "addcdiv" else operands[2:]
            number = arguments.get("other")
            return number != 0 and (
                (self.finite.issuperset(operands) and self.positive.issuperset(divisors)) or self._is_share(operands)
            )
        return False

    def _is_share(self, operands: list[str]) -> bool:
        """Return True for unsigned numbers over their own sum: at most one, or NaN."""
        if len(operands) != 2 or operands[0] not in self.unsigned:
            return False
        total = self.makers.get(operands[1])
        # A number may be added to the sum, to keep it from zero.
        if total is not None and _plain(total.op) == "add" and len(set(total.operands) - {None}) == 1:
            more = self._arguments(total).get("other")
            total = self.makers.get(total.operands[0] or "") if isinstance(more, int | float) and more >= 0 else None
        return total is not None and _plain(total.op) == "sum" and total.operands[0] == operands[0]

    def _is_positive(self, name: str, operands: list[str], arguments: Mapping[str, Any]) -> bool:
        other, bound = arguments.get("other"), arguments.get("min")
        if name == "add" and isinstance(other, int | float):
            return self.unsigned.issuperset(operands) and other >= self._least(operands)
        if name in ("clamp", "clamp_min") and isinstance(bound, int | float):
            return bound >= self._least(operands)
        floats = self._floats(operands)
        carried = name in _MOVING - _CASTS or name in ("sqrt", "mul", "multiply", "add", "rsqrt", "reciprocal")
        return carried and bool(floats) and self.positive.issuperset(floats) and all(n > 0 for n in _factors(arguments))

    def _is_unsigned(self, name: str, operands: list[str], arguments: Mapping[str, Any]) -> bool:
        if name in _SQUARES:
            return True
        if name == "pow":
            return arguments.get("exponent") in (2, 4)
        if name in ("mul", "multiply") and len(operands) == 2 and operands[0] == operands[1]:
            return True
        floats = self._floats(operands)
        carried = name in _MOVING or name in ("mul", "multiply", "add", *_DIVIDING, "rsqrt", "reciprocal")
        negated = any(number < 0 for number in _factors(arguments))
        return carried and bool(floats) and self.unsigned.issuperset(floats) and not negated

    def _floats(self, operands: list[str]) -> list[str]:
        """Return the float operands; the others are positions or masks."""
        return [operand for operand in operands if not _is_whole(self.tensors[operand].dtype)]

    def _least(self, operands: list[str]) -> float:
        """Return the smallest positive number in the dtype of the first operand."""
        dtype = self.tensors[operands[0]].dtype
        return torch.finfo(dtype).tiny if dtype.is_floating_point else 1


def _factors(arguments: Mapping[str, Any]) -> list[float]:
    """Return the plain numbers that an op multiplies with or adds."""
    given = (arguments.get(name) for name in ("other", "alpha", "value"))
    return [number for number in given if isinstance(number, int | float)]


def _plain(op: str) -> str:
    parts = op.split(".")
    return parts[1] if len(parts) > 1 else op


def _is_whole(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)


def _numbers_finite(arguments: Mapping[str, Any]) -> bool:
    return all(isfinite(leaf) for leaf in tree_leaves(arguments) if isinstance(leaf, float | complex))
