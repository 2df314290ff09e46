"""Masks beside grouped heads: what is run where a kernel takes no mask with fewer heads of keys than of queries."""

from __future__ import annotations

import torch
from torch.fx import Graph

import autopar
from autopar.rules.shard_call.attention import SDPA, attention_with_all_heads, repeat_masked_heads
from examples.hf import hf


def graph_of(masked: bool, grouped: bool) -> Graph:
    graph = Graph()
    query, key, value, mask = (graph.placeholder(name) for name in ("q", "k", "v", "mask"))
    given = {"attn_mask": mask} if masked else {"is_causal": True}
    graph.output(graph.call_function(SDPA, (query, key, value), {**given, "enable_gqa": grouped, "scale": 0.5}))
    return graph


def test_heads_are_repeated_for_a_mask_on_cuda_alone() -> None:
    for masked, grouped, device, changed in (
        (True, True, "cuda", True),
        (True, True, "cpu", False),
        (False, True, "cuda", False),
        (True, False, "cuda", False),
    ):
        graph = graph_of(masked, grouped)
        repeat_masked_heads(graph, device)
        calls = {node.target for node in graph.nodes if node.op == "call_function"}
        assert calls == {attention_with_all_heads if changed else SDPA}, (masked, grouped, device)


def test_repeated_heads_give_the_same() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, 6, 4, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2))
    mask = torch.rand(6, 6).bool() | torch.eye(6, dtype=torch.bool)
    module = torch.fx.GraphModule(torch.nn.Module(), graph_of(True, True))
    expected = module(q, k, v, mask)
    wanted = torch.autograd.grad(expected.square().sum(), (q, k, v))
    repeat_masked_heads(module.graph, "cuda")
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
