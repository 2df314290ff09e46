"""Normalisations, variances and deviations over split dims: the statistics are sums over all shards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from autopar.ir.values import NamedNode
from autopar.rules.notation import FactorKind
from autopar.rules.shard_call.local_call import FactorSlice, LocalCall
from autopar.sharding.lowered_ops.base import (
    LoweredOpContext,
    OpMessage,
    Send,
    WholeFactorOp,
    sum_dtype,
    total,
    whole_dims,
)


def _rows(split: LoweredOpContext, width: int) -> tuple[int, ...]:
    return (*split.shape[: len(split.shape) - width], *[1] * width)


def _width(node: NamedNode) -> int:
    return sum(1 for factor in node.rule.kinds.values() if factor is FactorKind.WHOLE)


class LayerNorm(WholeFactorOp):
    def messages(self, split: LoweredOpContext) -> tuple[OpMessage, ...]:
        rows = _rows(split, _width(split.node))
        return total(split, rows, shared=True), total(split, rows, shared=True)

    def run(
        self, split: LoweredOpContext, local: LocalCall, pieces: Mapping[str, FactorSlice], sends: tuple[Send, ...]
    ) -> Any:
        given = local.arguments
        x: Tensor = given["input"].to(sum_dtype(split.dtype))
        width = len(given["normalized_shape"])
        dims, count = list(range(-width, 0)), prod(given["normalized_shape"])
        centred = x - sends[0](x.sum(dims, keepdim=True)) / count
        variance = sends[1](centred.square().sum(dims, keepdim=True)) / count
        normed = centred * torch.rsqrt(variance + given["eps"])
        normed = normed if given["weight"] is None else normed * given["weight"]
        normed = (normed if given["bias"] is None else normed + given["bias"]).to(split.dtype)
        return normed if len(split.node.outputs) == 1 else (normed, None, None)


class RmsNorm(WholeFactorOp):
    def messages(self, split: LoweredOpContext) -> tuple[OpMessage, ...]:
        return (total(split, _rows(split, _width(split.node)), shared=True),)

    def run(
        self, split: LoweredOpContext, local: LocalCall, pieces: Mapping[str, FactorSlice], sends: tuple[Send, ...]
    ) -> Any:
        given = local.arguments
        x: Tensor = given["input"].to(sum_dtype(split.dtype))
        width = len(given["normalized_shape"])
        dims, count = list(range(-width, 0)), prod(given["normalized_shape"])
        eps = torch.finfo(x.dtype).eps if given["eps"] is None else given["eps"]
        normed = x * torch.rsqrt(sends[0](x.square().sum(dims, keepdim=True)) / count + eps)
        normed = (normed if given["weight"] is None else normed * given["weight"]).to(split.dtype)
        return normed if len(split.node.outputs) == 1 else (normed, None)


class BatchNorm(WholeFactorOp):
    """Batch normalisation in training over a split batch or image, with the statistics of the whole batch.

    Every rank updates its running statistics alike.
    """

    statistics = slice(1, 3)  # the running ones that follow are results proper

    def messages(self, split: LoweredOpContext) -> tuple[OpMessage, ...]:
        channels = split.shape[1:2]
        return total(split, channels, shared=True), total(split, channels, shared=True)

    def run(
        self, split: LoweredOpContext, local: LocalCall, pieces: Mapping[str, FactorSlice], sends: tuple[Send, ...]
    ) -> Any:
        given = local.arguments
        x: Tensor = given["input"].to(sum_dtype(split.dtype))
        dims = [dim for dim in range(x.dim()) if dim != 1]
        count = prod(split.whole[dim] for dim in dims)
        along = [1, -1, *[1] * (x.dim() - 2)]
        mean = sends[0](x.sum(dims)) / count
        centred = x - mean.reshape(along)
        variance = sends[1](centred.square().sum(dims)) / count
        scale = torch.rsqrt(variance + given["eps"])
        scale = scale if given["weight"] is None else scale * given["weight"]
        normed = centred * scale.reshape(along)
        normed = (normed if given["bias"] is None else normed + given["bias"].reshape(along)).to(split.dtype)
        if "running_mean" not in given:
            return normed, None, None
        unbiased = variance.detach() * (count / max(count - 1, 1))
        running = []
        for name, value in (("running_mean", mean.detach()), ("running_var", unbiased)):
            old, momentum = given[name], given["momentum"]
            running.append((1 - momentum) * old + momentum * value.to(old.dtype))
        return normed, None, None, *running


@dataclass(frozen=True)
class Moments(WholeFactorOp):
    """Variance, or with `root` standard deviation, with the mean where the op returns it."""

    root: bool = False
    with_mean: bool = False
    statistics = slice(0)  # both results are those that the user wants

    def messages(self, split: LoweredOpContext) -> tuple[OpMessage, ...]:
        dims = whole_dims(split.node)
        rows = tuple(1 if i in dims else size for i, size in enumerate(split.shape))
        return total(split, rows, shared=False), total(split, rows, shared=False)

    def run(
        self, split: LoweredOpContext, local: LocalCall, pieces: Mapping[str, FactorSlice], sends: tuple[Send, ...]
    ) -> Any:
        x: Tensor = local.arguments["self"].to(sum_dtype(split.dtype))
        dims = whole_dims(split.node)
        kinds = split.node.rule.kinds.items()
        count = prod(split.node.sizes[factor] for factor, kind in kinds if kind is FactorKind.WHOLE)
        correction = local.arguments.get("correction", int(local.arguments.get("unbiased", True)))
        freedom = max(count - (1 if correction is None else correction), 0)
        mean = sends[0](x.sum(dims, keepdim=True)) / count
        # To first order the variance does not change with the mean, so no gradient passes through it.
        spread = sends[1]((x - mean.detach()).square().sum(dims, keepdim=True)) / freedom
        spread = spread.sqrt() if self.root else spread
        results = [result.to(split.dtype) for result in (spread, mean)]
        if not local.arguments["keepdim"]:
            results = [result.squeeze(dims) for result in results]
        return tuple(results) if self.with_mean else results[0]


LOWERED_OPS = {
    "aten.layer_norm.default": LayerNorm(),
    "aten.native_layer_norm.default": LayerNorm(),
    "aten.rms_norm.default": RmsNorm(),
    "aten._fused_rms_norm.default": RmsNorm(),
    "aten._native_batch_norm_legit_functional.default": BatchNorm(),
    "aten._native_batch_norm_legit.no_stats": BatchNorm(),
    **{
        f"aten.{name}.{overload}": op
        for name, op in {
            "var": Moments(),
            "var_mean": Moments(with_mean=True),
            "std": Moments(root=True),
            "std_mean": Moments(root=True, with_mean=True),
        }.items()
        for overload in ("correction", "dim")
    },
}
