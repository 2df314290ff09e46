"""Softmax and cross-entropy over split dims."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.ir.values import NamedNode
from autopar.rules.shard_call.local_call import FactorSlice, LocalCall
from autopar.sharding.lowered_ops.base import (
    LoweredOpContext,
    OpMessage,
    Send,
    WholeFactorOp,
    dims_of,
    local_maximum,
    maximum,
    sum_dtype,
    total,
)

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


LOWERED_OPS = {
    "aten.softmax.int": Softmax(),
    "aten._softmax.default": Softmax(),
    "aten.log_softmax.int": Softmax(log=True),
    "aten._log_softmax.default": Softmax(log=True),
    "aten.cross_entropy_loss.default": CrossEntropy(),
}
