"""Softmax over a dim that is split: the largest number and the sum of the exponentials are shared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
    dims_of,
    largest_of,
    maximum,
    total,
    widened,
)


@dataclass(frozen=True)
class Softmax:
    log: bool = False

    def takes(self, node: NamedNode, factor: str) -> bool:
        return node.rule.kinds[factor] is FactorKind.WHOLE

    def allows(self, node: NamedNode, factor: str, atom: int) -> bool:
        return True

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
        x = given.to(result).to(widened(split.dtype)) if widened(result) == widened(split.dtype) else given.to(result)
        x = x - largest(largest_of(x, dim, keepdim=True))
        exponentials = x.exp()
        spread = added(exponentials.sum(dim, keepdim=True))
        return (x - spread.log() if self.log else exponentials / spread).to(result)


LOWERED_OPS = {
    "aten.softmax.int": Softmax(),
    "aten._softmax.default": Softmax(),
    "aten.log_softmax.int": Softmax(log=True),
    "aten._log_softmax.default": Softmax(log=True),
}
