"""Ops of a graph that a device runs by a better kernel than the one that the exported op takes there."""

from __future__ import annotations

from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from autopar.rules.call import arguments_by_name
from autopar.rules.shard_call.attention import SDPA, attention_on_gpu, attention_with_all_heads
from autopar.rules.shard_call.unequal_widths import attention_of_unequal_widths

__all__ = ["BATCH_NORM", "take_device_kernels", "with_most_memory"]

BATCH_NORM = torch.ops.aten._native_batch_norm_legit_functional.default
# Positions of the results: image, two statistics that only eager PyTorch uses, two running statistics.
STATISTICS = (1, 2)


def take_device_kernels(graph: Graph, device_type: str) -> None:
    """Replace ops, in place, by calls of the kernels that a device has for them."""
    for node in graph.find_nodes(op="call_function", target=SDPA):
        if device_type == "cuda" and node.kwargs.get("enable_gqa"):
            node.target = attention_on_gpu
        elif device_type == "cpu" and _has_unequal_widths(node):
            node.target = attention_of_unequal_widths
    if device_type == "cuda":
        for node in graph.find_nodes(op="call_function", target=BATCH_NORM):
            picked = [user.args[1] for user in node.users if user.target is getitem]
            if len(picked) == len(node.users) and not set(STATISTICS).intersection(picked):
                node.target = batch_norm_on_gpu


def with_most_memory(node: Node) -> Any:
    """Return the target of a node in its form of most memory on any device.

    Beside a mask attention has all heads. With values of another width it is fused, as on GPUs.
    """
    if node.target is not SDPA:
        return node.target
    if _has_unequal_widths(node):
        return attention_of_unequal_widths
    given = arguments_by_name(SDPA, node.args, node.kwargs)
    return attention_with_all_heads if given["enable_gqa"] and given["attn_mask"] is not None else SDPA


def _has_unequal_widths(node: Node) -> bool:
    widths = {_width(source) for source in (node.args[0], node.args[2]) if isinstance(source, Node)}
    return len(widths - {None}) > 1


def _width(source: Node) -> int | None:
    """Return the last size of a value of an exported or a generated graph; None where it is not known."""
    value = source.meta.get("val")
    shape = source.meta.get("local_shape", value.shape if isinstance(value, Tensor) else None)
    return shape[-1] if shape else None


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
