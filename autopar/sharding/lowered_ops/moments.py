"""Variances and deviations over dims that are split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor

from autopar.ir.values import NamedNode
from autopar.rules.notation import FactorKind
from autopar.rules.shard_call.local_call import FactorSlice, LocalCall
from autopar.sharding.lowered_ops.base import LoweredOpContext, OpMessage, Send, total, whole_dims, widened


@dataclass(frozen=True)
class Moments:
    root: bool = False
    with_mean: bool = False

    def takes(self, node: NamedNode, factor: str) -> bool:
        return node.rule.kinds[factor] is FactorKind.WHOLE

    def allows(self, node: NamedNode, factor: str, atom: int) -> bool:
        return True

    def messages(self, split: LoweredOpContext) -> tuple[OpMessage, ...]:
        dims = whole_dims(split.node)
        rows = tuple(1 if i in dims else size for i, size in enumerate(split.shape))
        return total(split, rows, shared=False), total(split, rows, shared=False)

    def run(
        self, split: LoweredOpContext, local: LocalCall, pieces: Mapping[str, FactorSlice], sends: tuple[Send, ...]
    ) -> Any:
        x: Tensor = local.arguments["self"].to(widened(split.dtype))
        dims = whole_dims(split.node)
        count = prod(split.node.sizes[factor] for factor in _whole(split.node))
        correction = local.arguments.get("correction", int(local.arguments.get("unbiased", True)))
        freedom = max(count - (1 if correction is None else correction), 0)
        mean = sends[0](x.sum(dims, keepdim=True)) / count
        # The variance does not change with the mean (to first order), so no gradient goes that way.
        spread = sends[1]((x - mean.detach()).square().sum(dims, keepdim=True)) / freedom
        spread = spread.sqrt() if self.root else spread
        results = [result.to(split.dtype) for result in (spread, mean)]
        if not local.arguments["keepdim"]:
            results = [result.squeeze(dims) for result in results]
        return tuple(results) if self.with_mean else results[0]


def _whole(node: NamedNode) -> tuple[str, ...]:
    return tuple(factor for factor, kind in node.rule.kinds.items() if kind is FactorKind.WHOLE)


LOWERED_OPS = {
    f"aten.{name}.{overload}": op
    for name, op in {
        "var": Moments(),
        "var_mean": Moments(with_mean=True),
        "std": Moments(root=True),
        "std_mean": Moments(root=True, with_mean=True),
    }.items()
    for overload in ("correction", "dim")
}
