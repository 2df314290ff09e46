"""Cross-entropy over classes that are split: no logits are sent, only numbers per target.

Two of them make the loss: the sum of the exponentials, and the logit of the target; with label smoothing, its mean with
all others. Each shard adds its part; the largest logit is taken off first, so that nothing overflows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from autopar.ir.values import NamedNode
from autopar.rules.shard_call.local_call import FactorSlice, LocalCall
from autopar.sharding.lowered_ops.base import (
    LoweredOpContext,
    OpMessage,
    Send,
    dims_of,
    largest_of,
    maximum,
    total,
    widened,
)

NONE, MEAN = 0, 1


class CrossEntropy:
    def takes(self, node: NamedNode, factor: str) -> bool:
        """Classes, of targets by number, without class weights."""
        scores, target = node.rule.operands[:2]
        if scores is None or target is None or (factor,) not in scores.terms or node.operands[2] is not None:
            return False
        classes = scores.terms[1 if len(scores.terms) > 1 else 0]
        return classes == (factor,) and factor not in target.factors

    def allows(self, node: NamedNode, factor: str, atom: int) -> bool:
        return atom == 0  # targets are counted from a shard's first class, so a shard must be one stretch

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
        logits: Tensor = given["self"].to(widened(split.dtype))
        counted = given["target"] != given["ignore_index"]
        known = (given["target"] >= 0) & (given["target"] < piece.total)
        torch._assert_async((known | ~counted).all(), f"cross_entropy: a target is not one of {piece.total} classes")
        top = largest(largest_of(logits, dim)).unsqueeze(dim)
        logits = logits - torch.where(top.isinf(), 0, top)
        index = torch.where(counted, given["target"], 0) - piece.start
        inside = (index >= 0) & (index < piece.length)
        if piece.length:
            found = logits.gather(dim, torch.where(inside, index, 0).unsqueeze(dim)).squeeze(dim)
        else:
            found = logits.sum(dim)  # zeros
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


LOWERED_OPS = {"aten.cross_entropy_loss.default": CrossEntropy()}
