"""Layer and RMS normalisation over dims that are split: each takes its statistics from all shards."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from autopar.ir.values import NamedNode
from autopar.rules.notation import FactorKind
from autopar.rules.shard_call.local_call import FactorSlice, LocalCall
from autopar.sharding.lowered_ops.base import LoweredOpContext, OpMessage, Send, total, widened


def _takes(node: NamedNode, factor: str) -> bool:
    """The normalised dims, where nobody reads the statistics."""
    return node.rule.kinds[factor] is FactorKind.WHOLE and not any(node.outputs[1:])


def _rows(split: LoweredOpContext, width: int) -> tuple[int, ...]:
    return (*split.shape[: len(split.shape) - width], *[1] * width)


def _width(node: NamedNode) -> int:
    return sum(1 for factor in node.rule.kinds.values() if factor is FactorKind.WHOLE)


class LayerNorm:
    def takes(self, node: NamedNode, factor: str) -> bool:
        return _takes(node, factor)

    def allows(self, node: NamedNode, factor: str, atom: int) -> bool:
        return True

    def messages(self, split: LoweredOpContext) -> tuple[OpMessage, ...]:
        rows = _rows(split, _width(split.node))
        return total(split, rows, shared=True), total(split, rows, shared=True)

    def run(
        self, split: LoweredOpContext, local: LocalCall, pieces: Mapping[str, FactorSlice], sends: tuple[Send, ...]
    ) -> Any:
        given = local.arguments
        x: Tensor = given["input"].to(widened(split.dtype))
        width = len(given["normalized_shape"])
        dims, count = list(range(-width, 0)), prod(given["normalized_shape"])
        centred = x - sends[0](x.sum(dims, keepdim=True)) / count
        variance = sends[1](centred.square().sum(dims, keepdim=True)) / count
        normed = centred * torch.rsqrt(variance + given["eps"])
        normed = normed if given["weight"] is None else normed * given["weight"]
        normed = (normed if given["bias"] is None else normed + given["bias"]).to(split.dtype)
        return normed if len(split.node.outputs) == 1 else (normed, None, None)


class RmsNorm:
    def takes(self, node: NamedNode, factor: str) -> bool:
        return _takes(node, factor)

    def allows(self, node: NamedNode, factor: str, atom: int) -> bool:
        return True

    def messages(self, split: LoweredOpContext) -> tuple[OpMessage, ...]:
        return (total(split, _rows(split, _width(split.node)), shared=True),)

    def run(
        self, split: LoweredOpContext, local: LocalCall, pieces: Mapping[str, FactorSlice], sends: tuple[Send, ...]
    ) -> Any:
        given = local.arguments
        x: Tensor = given["input"].to(widened(split.dtype))
        width = len(given["normalized_shape"])
        dims, count = list(range(-width, 0)), prod(given["normalized_shape"])
        eps = torch.finfo(x.dtype).eps if given["eps"] is None else given["eps"]
        normed = x * torch.rsqrt(sends[0](x.square().sum(dims, keepdim=True)) / count + eps)
        normed = (normed if given["weight"] is None else normed * given["weight"]).to(split.dtype)
        return normed if len(split.node.outputs) == 1 else (normed, None)


LOWERED_OPS = {
    "aten.layer_norm.default": LayerNorm(),
    "aten.native_layer_norm.default": LayerNorm(),
    "aten.rms_norm.default": RmsNorm(),
    "aten._fused_rms_norm.default": RmsNorm(),
}
