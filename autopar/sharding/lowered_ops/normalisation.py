"""Softmax, cross-entropy, normalisations, variances and deviations over split dims: statistics of all shards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from autopar.ir.values import NamedNode
from autopar.rules.notation import FactorKind
from autopar.rules.shard_call.batch_statistics import normalised_shard
from autopar.rules.shard_call.local_call import FactorSlice, LocalCall
from autopar.sharding.lowered_ops.base import (
    LoweredOp,
    LoweredOpContext,
    OpMessage,
    Send,
    WholeFactorOp,
    bare_total,
    dims_of,
    local_maximum,
    maximum,
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
        return bare_total(split, channels), bare_total(split, channels)

    def run(
        self, split: LoweredOpContext, local: LocalCall, pieces: Mapping[str, FactorSlice], sends: tuple[Send, ...]
    ) -> Any:
        given = local.arguments
        x: Tensor = given["input"]
        count = prod(size for dim, size in enumerate(split.whole) if dim != 1)
        affine = given["weight"], given["bias"]
        normed, mean, variance = normalised_shard(x, *affine, given["eps"], count, (sends[0], sends[1]))
        if "running_mean" not in given:
            return normed, None, None
        unbiased = variance * (count / max(count - 1, 1))
        running = []
        for name, value in (("running_mean", mean), ("running_var", unbiased)):
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


# -- softmax and cross-entropy -----------------------------------------------------------------------------------------


# Values of `reduction` in torch.nn.functional.
NONE, MEAN = 0, 1


@dataclass(frozen=True)
class Softmax(WholeFactorOp):
    """Softmax or its logarithm; the maximum and the sum of the exponentials are over all shards."""

    log: bool = False

    def messages(self, split: LoweredOpContext) -> tuple[OpMessage, ...]:
        (dim,) = dims_of(split).values()
        rows = (*split.shape[:dim], 1, *split.shape[dim + 1 :])
        return maximum(split, rows), total(split, rows, shared=True)

    def run(
        self, split: LoweredOpContext, local: LocalCall, pieces: Mapping[str, FactorSlice], sends: tuple[Send, ...]
    ) -> Any:
        (dim,) = dims_of(split).values()
        largest, added = sends
        given: Tensor = local.arguments["self"]
        result = local.arguments.get("dtype") or given.dtype
        if local.arguments.get("half_to_float"):
            result = torch.float32
        x, wide = given.to(result), sum_dtype(split.dtype)
        x = x.to(wide) if sum_dtype(result) == wide else x
        x = x - largest(local_maximum(x, dim, keepdim=True))
        exponentials = x.exp()
        spread = added(exponentials.sum(dim, keepdim=True))
        return (x - spread.log() if self.log else exponentials / spread).to(result)


class CrossEntropy:
    """Cross-entropy over split classes: no logits are sent, only three numbers per target.

    They are the largest logit, which is subtracted so that nothing overflows, the sum of the exponentials, and the
    logit of the target. Label smoothing mixes the latter with the mean of all logits.
    """

    def takes(self, node: NamedNode, factor: str) -> bool:
        # Only classes, with targets given by number and without class weights.
        scores, target = node.rule.operands[:2]
        if scores is None or target is None or (factor,) not in scores.terms or node.operands[2] is not None:
            return False
        classes = scores.terms[1 if len(scores.terms) > 1 else 0]
        return classes == (factor,) and factor not in target.factors

    def allows(self, node: NamedNode, factor: str, atom: int) -> bool:
        return atom == 0  # targets count from the first class of a shard, so a shard must be contiguous

    def messages(self, split: LoweredOpContext) -> tuple[OpMessage, ...]:
        (dim,) = dims_of(split).values()
        rows = split.shape[:dim] + split.shape[dim + 1 :]
        return maximum(split, rows), total(split, (2, *rows), shared=False)

    def run(
        self, split: LoweredOpContext, local: LocalCall, pieces: Mapping[str, FactorSlice], sends: tuple[Send, ...]
    ) -> Any:
        (factor,) = split.factors
        (dim,) = dims_of(split).values()
        piece, given = pieces[factor], local.arguments
        largest, added = sends
        logits: Tensor = given["self"].to(sum_dtype(split.dtype))
        counted = given["target"] != given["ignore_index"]
        known = (given["target"] >= 0) & (given["target"] < piece.total)
        torch._assert_async((known | ~counted).all(), f"cross_entropy: a target is not one of {piece.total} classes")
        top = largest(local_maximum(logits, dim)).unsqueeze(dim)
        logits = logits - torch.where(top.isinf(), 0, top)
        index = torch.where(counted, given["target"], 0) - piece.start
        inside = (index >= 0) & (index < piece.length)
        if piece.length:
            found = logits.gather(dim, torch.where(inside, index, 0).unsqueeze(dim)).squeeze(dim)
        else:
            found = logits.sum(dim)  # zeros: the shard has no class
        chosen, smoothing = torch.where(inside, found, 0), given["label_smoothing"]
        if smoothing:
            chosen = (1 - smoothing) * chosen + logits.sum(dim) * (smoothing / piece.total)
        exponentials, chosen = added(torch.stack([logits.exp().sum(dim), chosen])).unbind()
        loss = exponentials.log() - chosen
        loss = torch.where(counted, loss, 0)
        if given["reduction"] != NONE:
            loss = loss.sum()
        if given["reduction"] == MEAN:
            loss = loss / counted.sum()
        return loss.to(split.dtype)


LOWERED_OPS: Mapping[str, LoweredOp] = {
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
    "aten.softmax.int": Softmax(),
    "aten._softmax.default": Softmax(),
    "aten.log_softmax.int": Softmax(log=True),
    "aten._log_softmax.default": Softmax(log=True),
    "aten.cross_entropy_loss.default": CrossEntropy(),
}
