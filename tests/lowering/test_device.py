"""A graph runs on the device of its mesh. The meta device stands for a GPU: its tensors mix with none of the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import autopar
from autopar.lowering.emit import emit
from autopar.mesh import SubMesh
from autopar.sharding.layout.language import parse_layout
from autopar.sharding.propagation import propagate
from tests.ranks import SimulatedGroups, on_ranks

AXES = SubMesh({"a": 2})
SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def gpt2() -> nn.Module:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 32}
    return GPT2LMHeadModel(GPT2Config(use_cache=False, **sizes)).eval()  # no random numbers on the meta device


def mixtral() -> nn.Module:
    return MixtralForCausalLM(MixtralConfig(num_local_experts=4, **SIZES))


def t5() -> nn.Module:
    sizes = {
        "d_model": 32,
        "d_ff": 48,
        "d_kv": 8,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 64,
        "decoder_start_token_id": 0,
    }
    return T5ForConditionalGeneration(T5Config(use_cache=False, **sizes)).eval()


LAYOUTS = ("* -> none", "batch -> a; * -> none", "seq -> a; * -> none", "vocab -> a; * -> none")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("make", [llama, gpt2, mixtral, t5], ids=lambda make: make.__name__)
def test_every_tensor_is_on_the_device_of_the_mesh(make: Callable[[], nn.Module], layout: str) -> None:
    ids = torch.zeros(4, 16, dtype=torch.int64)
    graph = autopar.trace(make(), {"input_ids": ids, "labels": ids})
    assignment = propagate(graph, parse_layout(layout), AXES)

    def step(groups: SimulatedGroups) -> None:
        groups.device_type = "meta"
        module = emit(graph, assignment, groups, "sharded", False).graph_module
        shards = []
        for node in module.graph.nodes:
            if node.op == "placeholder":
                shards.append(_shard(graph, node))
        results = [one for one in module(*shards) if isinstance(one, Tensor)]
        assert {one.device.type for one in results} == {"meta"}, results
        loss = next(one for one in results if one.requires_grad and one.ndim == 0)
        loss.backward()

    on_ranks(AXES, step)


def _shard(graph: autopar.NamedGraph, node: torch.fx.Node) -> Tensor:
    by_node = {tensor.node: tensor for tensor in graph.tensors.values()}
    tensor = by_node.get(node.name)
    if tensor is None:  # the key of random numbers
        return torch.tensor([1, 0])
    made = torch.empty(node.meta["local_shape"], dtype=tensor.dtype, device="meta")
    return made.requires_grad_(tensor.requires_grad)
