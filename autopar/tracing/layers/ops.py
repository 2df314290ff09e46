"""Ops that stand in an exported graph around a recorded layer, and in place of an equal one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor


@cache
def layer_marks() -> tuple[Any, Any]:
    """Return the ops before and after a recorded call, defined at their first use."""
    for name in ("layer_begins", "layer_ends"):
        schema = "(Tensor[] tensors, int number) -> ()"
        op = torch.library.custom_op(f"autopar::{name}", _nothing, mutates_args=(), schema=schema)
        op.register_fake(_nothing)
    return torch.ops.autopar.layer_begins.default, torch.ops.autopar.layer_ends.default


@cache
def equal_layer_op() -> Any:
    """Return the op in place of an equal call, defined at its first use; `like` are the results of a recorded one."""
    schema = "(Tensor[] arguments, Tensor[] like, int number) -> Tensor[]"
    op = torch.library.custom_op("autopar::equal_layer", _as_before, mutates_args=(), schema=schema)
    op.register_fake(_as_before)
    return torch.ops.autopar.equal_layer.default


def _nothing(tensors: Sequence[Tensor], number: int) -> None:
    return None


def _as_before(arguments: Sequence[Tensor], like: Sequence[Tensor], number: int) -> list[Tensor]:
    return [torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=one.device) for one in like]
