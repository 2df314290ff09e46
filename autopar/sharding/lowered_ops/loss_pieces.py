"""A linear layer and its cross-entropy in pieces, over split classes: three numbers of each row are sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autopar.ir.values import NamedNode
from autopar.rules.ops.loss_pieces import LINEAR_CROSS_ENTROPY
from autopar.rules.shard_call.local_call import FactorSlice, LocalCall
from autopar.rules.shard_call.loss_pieces import Classes, LogitsForm, losses_of_rows
from autopar.sharding.lowered_ops.base import LoweredOpContext, OpMessage, Send, maximum, total

# The factor of the classes.
CLASSES = "v"


class LinearCrossEntropy:
    """Cross-entropy over the classes of a shard; all pieces together take two messages, as whole logits do."""

    def takes(self, node: NamedNode, factor: str) -> bool:
        return factor == CLASSES

    def allows(self, node: NamedNode, factor: str, atom: int) -> bool:
        return atom == 0  # targets count from the first class of a shard, so a shard must be contiguous

    def messages(self, split: LoweredOpContext) -> tuple[OpMessage, ...]:
        rows = split.shape[:1]
        # The weight may be trained where the rows have no gradient.
        trained = any(operand is not None and operand.differentiable for operand in split.operands)
        return maximum(split, rows), replace(total(split, (2, *rows), shared=False), differentiable=trained)

    def run(
        self, split: LoweredOpContext, local: LocalCall, pieces: Mapping[str, FactorSlice], sends: tuple[Send, ...]
    ) -> Any:
        given = dict(local.arguments)
        rows, weight, bias, target = (given.pop(name) for name in ("input", "weight", "bias", "target"))
        form = LogitsForm(*(given.pop(name) for name in ("scale", "softcap", "dtype")))
        classes = Classes(pieces[CLASSES].start, pieces[CLASSES].total, *sends)
        return losses_of_rows(rows, weight, bias, target, classes, form, **given)


LOWERED_OPS = {str(LINEAR_CROSS_ENTROPY): LinearCrossEntropy()}
