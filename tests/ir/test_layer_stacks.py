"""Layers of a model: where several kinds alternate, and where one is unlike those that repeat, each is a layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import autopar
from autopar.ir.graph import NamedGraph
from autopar.ir.short_graph import shorten

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "use_cache": False,
}


def traced(family: str, layers: int, **sizes: Any) -> NamedGraph:
    config = getattr(transformers, f"{family}Config")(num_hidden_layers=layers, **SIZES, **sizes)
    with torch.device("meta"):
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        ids = torch.zeros(2, 16, dtype=torch.int64)
    return autopar.trace(model, {"input_ids": ids, "labels": ids})


def bamba(layers: int, attention: Sequence[int]) -> NamedGraph:
    own = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}
    return traced("Bamba", layers, attn_layer_indices=list(attention), **own)


def assert_are_modules(graph: NamedGraph, layers: Sequence[str]) -> None:
    """Check that the graph has these layers, each with all ops of its module and no other."""
    assert tuple(graph.ops_of_layers) == tuple(layers)
    for path, ops in graph.ops_of_layers.items():
        inside = [node.name for node in graph.nodes if f"{node.origin.module_path}.".startswith(f"{path}.")]
        assert list(ops) == inside, path


def test_layers_that_alternate_and_those_that_do_not_repeat() -> None:
    graph = bamba(8, (3, 6))
    # The layers 3 and 6 have attention; with the last one they are in no unit.
    inside = {path for repeat in graph.repeats for path in repeat.module_paths}
    assert inside == {f"model.layers.{number}" for number in (0, 1, 2, 4, 5)}
    assert_are_modules(graph, [f"model.layers.{number}" for number in range(8)])
    (stack,) = graph.stacks
    assert stack.are_distinct
    assert "8 layers: model.layers.0 ... model.layers.7" in str(graph)


def test_layers_of_two_masks() -> None:
    graph = traced("GptOss", 4, head_dim=4, num_local_experts=4, num_experts_per_tok=2)
    assert [repeat.count for repeat in graph.repeats] == [2]
    assert_are_modules(graph, [f"model.layers.{number}" for number in range(4)])


def test_units_end_where_modules_do() -> None:
    # The norm behind the last layer is equal to that before each one: units might begin behind it.
    graph = traced("SmolLM3", 8, pad_token_id=0)
    (repeat,) = graph.repeats
    assert repeat.module_paths == ("model.layers.0", "model.layers.4")
    assert_are_modules(graph, [f"model.layers.{number}" for number in range(8)])


def test_a_first_layer_unlike_the_others() -> None:
    graph = traced("Ernie4_5_Moe", 4, moe_num_experts=4, moe_k=2, moe_intermediate_size=8)
    assert [repeat.count for repeat in graph.repeats] == [3]
    assert_are_modules(graph, [f"model.layers.{number}" for number in range(4)])


def test_stages_of_a_convolutional_network() -> None:
    config = transformers.ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[3, 4], layer_type="basic")
    graph = autopar.trace(transformers.ResNetModel(config), {"pixel_values": torch.randn(1, 3, 32, 32)})
    assert [[layer.path for layer in stack.layers] for stack in graph.stacks] == [
        [f"encoder.stages.{stage}.layers.{number}" for number in range(count)] for stage, count in ((0, 3), (1, 4))
    ]


class Alternating(nn.Module):
    """Layers of a list, one after the other."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Block(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(6), inner

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(self.norm(x))
        return found


def kinds() -> list[nn.Module]:
    return [one for _ in range(3) for one in (nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.GELU()))]


@pytest.mark.parametrize("wrapped", [False, True])
def test_modules_of_no_common_class_are_one_layer(wrapped: bool) -> None:
    model = Alternating([Block(one) for one in kinds()] if wrapped else kinds())
    graph = autopar.trace(model, (torch.randn(4, 6),))
    paths = [f"layers.{number}" for number in range(0, 6, 1 if wrapped else 2)]
    assert tuple(graph.ops_of_layers) == tuple(paths)
    # Sums of the model's own forward are of the layer before.
    assert {op for ops in graph.ops_of_layers.values() for op in ops} == {node.name for node in graph.nodes}


def test_a_linear_layer_at_the_end_is_no_layer() -> None:
    linear = [nn.Linear(6, 6), nn.GELU()]
    model = nn.Sequential(*linear, *[nn.Linear(6, 6), nn.GELU()], nn.Linear(6, 3))
    graph = autopar.trace(model, (torch.randn(4, 6),))
    assert tuple(graph.ops_of_layers) == ("0", "2")


class Again(nn.Module):
    """Calls of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + self.block(x)
        return x


def test_calls_of_one_module_have_one_path() -> None:
    graph = autopar.trace(Again(), (torch.randn(4, 6),))
    (stack,) = graph.stacks
    assert len(stack.layers) == 3
    assert not stack.are_distinct
    assert len(graph.ops_of_layers) == 1


def test_layers_of_a_short_graph_stand_for_their_like() -> None:
    short = shorten(bamba(14, (3, 6, 9, 12)))
    assert short is not None
    # Units begin at the layers 1, 4, 7 and 10; the third one goes.
    assert {path: other for path, other in short.layers.items() if path != other} == {
        f"model.layers.{number}": f"model.layers.{number - 3}" for number in (7, 8, 9)
    }
    assert tuple(short.graph.ops_of_layers) == tuple(dict.fromkeys(short.layers.values()))
    assert short.counts["model.layers.4"] == 2
