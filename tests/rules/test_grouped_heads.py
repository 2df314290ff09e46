"""Grouped heads on GPUs: they are repeated where no fused kernel takes fewer heads of keys than of queries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import Graph
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.rules.shard_call.attention import SDPA
from autopar.rules.shard_call.device_kernels import take_device_kernels
from examples.hf import hf


def graph_of(masked: bool, grouped: bool) -> Graph:
    graph = Graph()
    query, key, value, mask = (graph.placeholder(name) for name in ("q", "k", "v", "mask"))
    given = {"attn_mask": mask} if masked else {"is_causal": True}
    graph.output(graph.call_function(SDPA, (query, key, value), {**given, "enable_gqa": grouped, "scale": 0.5}))
    return graph


class Heads(TorchDispatchMode):
    """Heads of the keys that the kernels of attention get."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "scaled_dot_product" in str(func):
            self.seen.append(args[1].shape[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("masked", "dtype", "device", "heads"),
    [
        (True, torch.bfloat16, "cuda", 4),
        (False, torch.float32, "cuda", 4),
        (False, torch.bfloat16, "cuda", 2),
        (True, torch.bfloat16, "cpu", 2),
        (False, torch.float32, "cpu", 2),
    ],
)
def test_heads_are_repeated_where_no_kernel_takes_groups(
    masked: bool, dtype: torch.dtype, device: str, heads: int
) -> None:
    graph = graph_of(masked, True)
    take_device_kernels(graph, device)
    q, k, v = (torch.randn(2, h, 6, 4, dtype=dtype, requires_grad=True) for h in (4, 2, 2))
    mask = torch.ones(6, 6, dtype=torch.bool)
    with Heads() as found:
        torch.fx.GraphModule(torch.nn.Module(), graph)(q, k, v, mask)
    assert found.seen == [heads]


def test_attention_with_as_many_heads_stays() -> None:
    graph = graph_of(True, False)
    take_device_kernels(graph, "cuda")
    assert {node.target for node in graph.nodes if node.op == "call_function"} == {SDPA}


def test_repeated_heads_give_the_same() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, 6, 4, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2))
    mask = torch.rand(6, 6).bool() | torch.eye(6, dtype=torch.bool)
    module = torch.fx.GraphModule(torch.nn.Module(), graph_of(True, True))
    expected = module(q, k, v, mask)
    wanted = torch.autograd.grad(expected.square().sum(), (q, k, v))
    take_device_kernels(module.graph, "cuda")
    module.recompile()
    found = module(q, k, v, mask)
    assert torch.allclose(found, expected, rtol=0, atol=1e-14)
    for mine, theirs in zip(torch.autograd.grad(found.square().sum(), (q, k, v)), wanted, strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-13)


def test_what_the_repeated_heads_keep_is_counted() -> None:
    """Beside a mask, keys and values are kept for the backward at the heads of the queries."""
    kept = {}
    for given in (False, True):
        model, inputs = hf("llama", batch=2, seq=8)
        mask = {"attention_mask": torch.ones_like(inputs["input_ids"])} if given else {}
        graph = autopar.trace(model, {**inputs, **mask})
        (first, *_) = [node for node in graph.nodes if node.op == str(SDPA)]
        kept[given] = graph.footprints[first.node].internal_bytes, sum(save.bytes for save in graph.saved_inside)
    repeated = 2 * (2 * 4 * 8 * 12) * 4  # keys and values: batch, heads, seq, head_dim in float32
    mask = (2 * 8 * 8) * 4  # torch makes numbers of it
    assert kept[True][0] - kept[False][0] == repeated + mask
    assert kept[True][1] - kept[False][1] == 2 * (repeated + mask)  # in two layers
