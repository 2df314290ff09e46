"""Calls by which ops multiply in float8 in place of the op of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from autopar.ir.analysis.float8_products import LINEAR, in_float8
from autopar.ir.precision import Precision
from autopar.ir.values import NamedNode, NamedTensor
from autopar.lowering.modules.float8 import FLOAT8_LINEAR
from autopar.lowering.modules.float8_groups import float8_grouped
from autopar.rules.shard_call.local_call import LocalCall

__all__ = ["float8_call"]


def float8_call(
    node: NamedNode, tensors: Mapping[str, NamedTensor], local: LocalCall, precision: Precision
) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """Return what to call with which arguments; None for ops that are not in float8."""
    if not in_float8(node, tensors, precision):
        return None
    given = local.arguments
    if node.op == LINEAR:
        return FLOAT8_LINEAR, (given["input"], given["weight"], given["bias"], precision.linears == "fp8-rows")
    # Rows that are stored sparsely never get here, so every group has as many.
    return float8_grouped, (given["rows"], given["matrices"], given["bias"])
