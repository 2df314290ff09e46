"""Ops of a graph that a GPU runs by a faster kernel than the one that the exported op names."""

from __future__ import annotations

from operator import getitem

import torch
from torch import Tensor
from torch.fx import Graph

from autopar.rules.shard_call.attention import repeat_grouped_heads

__all__ = ["BATCH_NORM", "take_gpu_kernels"]

BATCH_NORM = torch.ops.aten._native_batch_norm_legit_functional.default
# Positions of the results: image, two statistics that only eager PyTorch uses, two running statistics.
STATISTICS = (1, 2)


def take_gpu_kernels(graph: Graph, device_type: str) -> None:
    """Replace ops, in place, by calls of the kernels that a device has for them."""
    repeat_grouped_heads(graph, device_type)
    if device_type == "cuda":
        for node in graph.find_nodes(op="call_function", target=BATCH_NORM):
            picked = [user.args[1] for user in node.users if user.target is getitem]
            if len(picked) == len(node.users) and not set(STATISTICS).intersection(picked):
                node.target = batch_norm_on_gpu


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
