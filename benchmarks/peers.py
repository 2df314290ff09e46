"""The GPT of examples/gpt.py, parallelised by what torch itself offers: what our steps are compared with."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from examples.gpt import Attention

__all__ = ["PEERS", "Peer"]

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Peer:
    """A model to call, the share of the global inputs it is called with, and what it must be called in."""

    model: nn.Module
    inputs: Inputs
    around: Callable[[], AbstractContextManager[None]] = nullcontext


def ddp(model: Any, inputs: Inputs, rank: int, ranks: int) -> Peer:
    return Peer(DistributedDataParallel(model), _share(inputs, rank, ranks))


def fsdp(model: Any, inputs: Inputs, rank: int, ranks: int) -> Peer:
    """Gathered once and kept for the backward, as ours."""
    return _fully_sharded(model, inputs, rank, ranks, again=False)


def fsdp_again(model: Any, inputs: Inputs, rank: int, ranks: int) -> Peer:
    """As `fully_shard` is by default: what it gathered is gathered again in the backward."""
    return _fully_sharded(model, inputs, rank, ranks, again=True)


def _fully_sharded(model: Any, inputs: Inputs, rank: int, ranks: int, again: bool) -> Peer:
    mesh = init_device_mesh("cpu", (ranks,))
    for block in getattr(model, "blocks", None) or model.model.layers:
        fully_shard(block, mesh=mesh, reshard_after_forward=again)
    fully_shard(model, mesh=mesh, reshard_after_forward=again)
    return Peer(model, _share(inputs, rank, ranks))


def megatron(model: Any, inputs: Inputs, rank: int, ranks: int) -> Peer:
    """Heads, feed-forward and vocabulary split; the loss of the split logits is torch's `loss_parallel`."""
    mesh = init_device_mesh("cpu", (ranks,))
    block_plan = {
        "attention.qkv": ColwiseParallel(),
        "attention.out": RowwiseParallel(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }
    for block in model.blocks:
        heads = block.attention.heads
        with torch.no_grad():
            for parameter in (block.attention.qkv.weight, block.attention.qkv.bias):
                rest = parameter.shape[1:]
                by_rank = parameter.view(3, ranks, heads // ranks, -1, *rest).transpose(0, 1)
                parameter.copy_(by_rank.reshape(-1, *rest))
        block.attention.__class__ = _LocalHeads
        block.attention.heads = heads // ranks
        parallelize_module(block, mesh, block_plan)
    model_plan = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, model_plan)
    model.head.weight = model.tokens.weight
    return Peer(model, inputs, loss_parallel)


class _LocalHeads(Attention):
    """Attention in which every rank has some of the heads: of q, k and v the same ones."""

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        qkv = self.qkv(x).view(batch, seq, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        found: Tensor = self.out(y.transpose(1, 2).reshape(batch, seq, -1))
        return found


def plain(model: Any, inputs: Inputs, rank: int, ranks: int) -> Peer:
    return Peer(model, inputs)


def _share(inputs: Inputs, rank: int, ranks: int) -> Inputs:
    return {name: value.chunk(ranks)[rank] for name, value in inputs.items()}


PEERS: dict[str, Callable[[Any, Inputs, int, int], Peer]] = {
    "ddp": ddp,
    "fsdp": fsdp,
    "fsdp_again": fsdp_again,
    "megatron": megatron,
    "plain": plain,
}
