"""Where the literature says what is best, the planner finds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.cost.hardware.cluster import Cluster, load_cluster
from autopar.sharding.options import TrainingOptions
from autopar.solver.solve import SolvedPlan, solve_plan
from examples.gpt import gpt
from examples.moe import moe

H100 = load_cluster("h100")
# Its optimizer steps so fast that a plan without a limit leaves the embeddings whole.
FAST_STEP = replace(H100, device=replace(H100.device, optimizer_bytes_per_second=None))


def solved(
    model: nn.Module, inputs: Any, axes: Mapping[str, int], cluster: Cluster = H100, **given: Any
) -> tuple[autopar.NamedGraph, SolvedPlan]:
    graph = autopar.trace(model.bfloat16(), inputs)
    options = TrainingOptions(compiled=True)  # else such small models wait for their host
    return graph, solve_plan(graph, axes, cluster, time_limit=3600, options=options, **given)


def axes_of(found: SolvedPlan, op: str) -> dict[str, tuple[str, ...]]:
    """The axes that split each factor of an op."""
    splits: dict[str, tuple[str, ...]] = {}
    for (factor, _), axes in found.plan.assignment.ops[op].choice.splits:
        splits[factor] = (*splits.get(factor, ()), *axes)
    return splits


def test_data_parallelism_for_a_small_model_and_a_large_batch() -> None:
    model, inputs = gpt(layers=1, d_model=256, heads=4, vocab=512, seq=512, batch=256, device="meta")
    _, found = solved(model, inputs, {"dp": 8})
    assert axes_of(found, "blocks.0.up/linear") == {"a": ("dp",)}
    assert axes_of(found, "blocks.0.attention.qkv/linear") == {"a": ("dp",)}


def test_parameters_are_split_when_memory_binds() -> None:
    model, inputs = gpt(layers=1, d_model=2048, heads=16, vocab=2048, seq=256, batch=16, device="meta")
    graph, free = solved(model, inputs, {"dp": 8}, FAST_STEP, strategies=False)
    limit = 0.75 * free.costs.memory.peak_bytes
    _, bound = solved(model, inputs, {"dp": 8}, FAST_STEP, memory_bytes=limit, strategies=False)
    assert not free.plan.assignment.stored["tokens.weight"].splits[0], "nothing binds"
    assert bound.costs.memory.peak_bytes <= limit
    large = [tensor.name for tensor in graph.parameters if len(tensor.shape) == 2]
    assert all(any(bound.plan.assignment.stored[name].splits) for name in large)
    assert bound.costs.step_seconds >= free.costs.step_seconds


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(16, 32, 3, padding=1)
        self.second = nn.Conv2d(32, 16, 3, padding=1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(images).relu()).square().mean()


def test_tensor_parallelism_stays_within_the_nodes() -> None:
    """A Llama layer with a small batch: columns of q, k, v, gate and up and rows of down over the links inside a node,
    the batch over the network between nodes. What follows attention may have its rows split, or its tokens. Of fewer
    tokens the activations are less to send than the gradients of the weights."""
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=1,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        use_cache=False,
    )
    with torch.device("meta"):
        model, ids = LlamaForCausalLM(config), torch.randint(config.vocab_size, (2, 5120))
    _, found = solved(model, {"input_ids": ids}, {"dp": 2, "tp": 8}, strategies=False)
    layer = {op.split(".")[-1]: axes_of(found, op) for op in found.plan.assignment.ops if op.endswith("_proj/linear")}
    columns, rows = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("down_proj",)
    assert all(layer[f"{name}/linear"] == {"a": ("dp",), "n": ("tp",)} for name in columns)
    assert all(layer[f"{name}/linear"] == {"a": ("dp",), "k": ("tp",)} for name in rows)
    assert layer["o_proj/linear"] in ({"a": ("dp",), "k": ("tp",)}, {"a": ("dp",), "b": ("tp",)})


def test_large_images_are_cut_in_tiles() -> None:
    with torch.device("meta"):
        model, images = Convolution(), torch.empty(1, 16, 2048, 2048)
    _, found = solved(model, (images.bfloat16(),), {"s": 4})
    assert any(one.kind == "halo_exchange" for one in found.costs.communication)
    assert axes_of(found, "first/conv2d")
    assert axes_of(found, "second/conv2d")


def test_a_large_vocabulary_is_split() -> None:
    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(2**19, 512)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.table(ids).float().square().mean()

    with torch.device("meta"):
        model, ids = Tables(), torch.empty(8, 16, dtype=torch.long)
    graph, found = solved(model, (ids,), {"tp": 8})
    (table,) = (tensor.name for tensor in graph.parameters)
    assert any(found.plan.assignment.stored[table].splits), "the table is not on every rank"
    sent = [one for one in found.costs.communication if one.of == "parameters"]
    assert not sent, "and it is not gathered"


def test_experts_stay_where_they_are() -> None:
    model, inputs = moe(d_model=1024, d_ff=4096, experts=8, seq=256, batch=16, device="meta")
    graph, found = solved(model, inputs, {"ep": 8})
    stacks = [tensor for tensor in graph.parameters if {"expert", "d_ff"} <= set(tensor.dims)]
    assert len(stacks) == 4, "an up and a down projection in each of two layers"
    for tensor in stacks:
        assert found.plan.assignment.stored[tensor.name].splits[tensor.dims.index("expert")] == ("ep",)
