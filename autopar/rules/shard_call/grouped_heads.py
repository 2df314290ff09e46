"""Attention with a mask and grouped heads, for kernels that take one or the other.

On CUDA the kernel that takes a mask wants as many heads of keys as of queries; with fewer, torch computes all scores by
plain products and keeps them. There the heads are repeated just before the kernel; the CPU's kernel takes both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

__all__ = ["attention_with_all_heads", "repeat_masked_heads", "with_all_heads", "with_most_memory"]

aten = torch.ops.aten
SDPA = aten.scaled_dot_product_attention.default


def with_all_heads(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of attention with keys and values repeated to the queries' heads."""
    if not arguments["enable_gqa"]:
        return dict(arguments)
    heads = arguments["query"].shape[-3]
    pairs = {name: arguments[name] for name in ("key", "value")}
    repeated = {
        name: x if x.shape[-3] == heads else x.repeat_interleave(heads // x.shape[-3], -3) for name, x in pairs.items()
    }
    return {**arguments, **repeated, "enable_gqa": False}


def attention_with_all_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run `scaled_dot_product_attention` with as many heads of keys as of queries."""
    given = with_all_heads({"query": query, "key": key, "value": value, "enable_gqa": enable_gqa})
    operands = given["query"], given["key"], given["value"]
    result: Tensor = SDPA(*operands, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=given["enable_gqa"])
    return result


def repeat_masked_heads(graph: Graph, device_type: str) -> None:
    """Repeat heads before attention with a mask, in place, where the kernels of a device need it."""
    if device_type == "cuda":
        for node in graph.find_nodes(op="call_function", target=SDPA):
            node.target = with_most_memory(node)


def with_most_memory(node: Node) -> Any:
    """Return the target of a node in its form of most memory: with all heads, beside a mask."""
    if node.target is not SDPA or not node.kwargs.get("enable_gqa"):
        return node.target
    mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
    return node.target if mask is None else attention_with_all_heads
