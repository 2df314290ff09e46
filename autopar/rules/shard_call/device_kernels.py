"""Ops of a graph that a device runs by a better kernel than the one that the exported op takes there."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from autopar.rules.call import arguments_by_name
from autopar.rules.shard_call.attention import SDPA, attention_on_gpu, attention_with_all_heads, in_sum_dtype
from autopar.rules.shard_call.dropout import attention_with_dropout
from autopar.rules.shard_call.fused_attention import fused_attention

__all__ = ["BATCH_NORM", "batch_norm_on_gpu", "of_any_dtypes", "take_device_kernels", "with_most_memory"]

BATCH_NORM = torch.ops.aten._native_batch_norm_legit_functional.default
# Ops of an image, a weight, a bias and two running statistics.
BATCH_NORMS = (BATCH_NORM, torch.ops.aten._native_batch_norm_legit_no_training.default)
# Positions of the results: image, two statistics that only eager PyTorch uses, two running statistics.
STATISTICS = (1, 2)


def take_device_kernels(graph: Graph, device_type: str, trained: Callable[[Node], bool] = lambda value: False) -> None:
    """Replace ops, in place, by calls of the kernels that a device has for them; `trained`: a value has a gradient."""
    for node in graph.find_nodes(op="call_function", target=SDPA):
        if _is_written_out(node, device_type, trained):
            node.target = fused_attention
        elif device_type == "cuda" and node.kwargs.get("enable_gqa"):
            node.target = attention_on_gpu
    for op in BATCH_NORMS:
        for node in graph.find_nodes(op="call_function", target=op):
            picked = [user.args[1] for user in node.users if user.target is getitem]
            are_read = len(picked) < len(node.users) or not set(STATISTICS).isdisjoint(picked)
            is_cudnn = op is BATCH_NORM and device_type == "cuda" and not are_read
            node.target = of_any_dtypes(batch_norm_on_gpu if is_cudnn else op)


def with_most_memory(node: Node, trained: Callable[[Node], bool]) -> Any:
    """Return the target of a node in its form of most memory on any device: with all heads beside a mask.

    With dropout several ranks write attention out.
    """
    if node.target is not SDPA:
        return node.target
    given = arguments_by_name(SDPA, node.args, node.kwargs)
    if given["dropout_p"]:
        return attention_with_dropout
    if _is_written_out(node, "cpu", trained):
        return fused_attention
    return attention_with_all_heads if given["enable_gqa"] and given["attn_mask"] is not None else SDPA


def _is_written_out(node: Node, device_type: str, trained: Callable[[Node], bool]) -> bool:
    """Return whether torch takes no fused kernel for the shapes of attention, or for a gradient of its mask."""
    given = arguments_by_name(SDPA, node.args, node.kwargs)
    query, key, value = (_shape(given[name]) for name in ("query", "key", "value"))
    if not (query and key and value):
        return False
    heads = 1 if given["enable_gqa"] else 2
    if len(query) != 4 or not query[:heads] == key[:heads] == value[:heads]:
        return True
    mask = given["attn_mask"]
    return device_type == "cpu" and (query[-1] != value[-1] or (isinstance(mask, Node) and trained(mask)))


def _shape(source: Any) -> tuple[int, ...] | None:
    """Return the shape of a value of an exported or a generated graph; None where it is not known."""
    value = source.meta.get("val")
    shape = source.meta.get("local_shape", value.shape if isinstance(value, Tensor) else None)
    return None if shape is None else tuple(shape)


@cache
def of_any_dtypes(op: Callable[..., Any]) -> Callable[..., Any]:
    """Return a batch normalisation whose statistics may have another dtype than its image and its weights.

    Weights are in the dtype of the compute, and buffers are not. Kernels take both in one dtype: that of the image, or
    float32 for an image in half precision.
    """

    def batch_norm(x: Tensor, *operands: Tensor | None, **named: Any) -> Any:
        statistics = [one for one in operands[2:4] if isinstance(one, Tensor)]
        if all(one.dtype == x.dtype for one in statistics):
            return op(x, *operands, **named)
        wide = in_sum_dtype(x).dtype
        results = op(x, *(one.to(wide) if isinstance(one, Tensor) else one for one in operands), **named)
        # Ops that update no statistics have three results.
        updated = (new.to(old.dtype) for new, old in zip(results[3:], statistics, strict=False))
        return (*results[:3], *updated)

    return batch_norm


def batch_norm_on_gpu(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, None, None, Tensor, Tensor]:
    """Run the functional batch normalisation of exported graphs by the kernel of eager PyTorch, that of cuDNN."""
    running = running_mean.clone(), running_var.clone()
    by_cudnn = torch.backends.cudnn.enabled
    normed = torch.batch_norm(x, weight, bias, *running, training, momentum, eps, by_cudnn)
    return normed, None, None, *running
