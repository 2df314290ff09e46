"""Batch normalisation in training over a batch (and space) that is split: the statistics are those of the whole batch.

So are the running ones, which every rank computes alike.
"""

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


class BatchNorm:
    def takes(self, node: NamedNode, factor: str) -> bool:
        """What the statistics are taken over, where nobody reads those of this batch."""
        return node.rule.kinds[factor] is FactorKind.WHOLE and not any(node.outputs[1:3])

    def allows(self, node: NamedNode, factor: str, atom: int) -> bool:
        return True

    def messages(self, split: LoweredOpContext) -> tuple[OpMessage, ...]:
        channels = split.shape[1:2]
        return total(split, channels, shared=True), total(split, channels, shared=True)

    def run(
        self, split: LoweredOpContext, local: LocalCall, pieces: Mapping[str, FactorSlice], sends: tuple[Send, ...]
    ) -> Any:
        given = local.arguments
        x: Tensor = given["input"].to(widened(split.dtype))
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
        running = [
            _moved(given[name], value, given["momentum"])
            for name, value in (("running_mean", mean.detach()), ("running_var", unbiased))
        ]
        return normed, None, None, *running


def _moved(running: Tensor, value: Tensor, momentum: float) -> Tensor:
    return (1 - momentum) * running + momentum * value.to(running.dtype)


LOWERED_OPS = {
    "aten._native_batch_norm_legit_functional.default": BatchNorm(),
    "aten._native_batch_norm_legit.no_stats": BatchNorm(),
}
