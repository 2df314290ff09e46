"""Repeated layers are found in the graph, whatever the modules are called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AlbertConfig,
    AlbertModel,
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetModel,
    SwinConfig,
    SwinModel,
    T5Config,
    T5Model,
)

import autopar
from autopar.ir.analysis.repeated_layers import RepeatedLayers, repeated_layers
from autopar.tracing.export.export import export


def repeats(model: nn.Module, **inputs: torch.Tensor) -> tuple[RepeatedLayers, ...]:
    exported = export(model.eval(), inputs)
    found = repeated_layers(exported)
    nodes = {node.name: node for node in exported.graph_module.graph.nodes}
    seen: set[str] = set()
    for repeat in found:
        assert len(repeat.module_paths) == repeat.count
        first = [nodes[name].target for name in repeat.layers[0]]
        for layer in repeat.layers:
            assert [nodes[name].target for name in layer] == first
            assert not seen & set(layer)
            seen.update(layer)
    calls = [node.name for node in exported.graph_module.graph.nodes if node.op == "call_function"]
    assert all(calls[repeat.start] == repeat.layers[0][0] for repeat in found)
    return found


def ids() -> torch.Tensor:
    return torch.tensor([[1, 4, 2, 7], [5, 1, 0, 3]])


@pytest.mark.parametrize("layers", [2, *(pytest.param(count, marks=pytest.mark.slow) for count in (3, 5))])
def test_llama(layers: int) -> None:
    config = LlamaConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=layers, num_attention_heads=4)
    config.vocab_size = 10
    (found,) = repeats(LlamaForCausalLM(config), input_ids=ids())
    assert found.module_paths == tuple(f"model.layers.{k}" for k in range(layers))
    assert found.period > 40


def test_t5_whose_first_layers_also_compute_the_position_bias() -> None:
    config = T5Config(d_model=8, d_kv=4, d_ff=16, num_layers=4, num_heads=2, vocab_size=10, decoder_start_token_id=0)  # type: ignore[call-arg]
    encoder, decoder = repeats(T5Model(config), input_ids=ids(), decoder_input_ids=ids())
    assert [path.split(".")[:3] for path in encoder.module_paths] == [["encoder", "block", str(k)] for k in range(4)]
    assert [path.split(".")[:3] for path in decoder.module_paths] == [["decoder", "block", str(k)] for k in range(4)]


def test_resnet_stages() -> None:
    config = ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[3, 4], layer_type="basic")
    first, second = repeats(ResNetModel(config), pixel_values=torch.randn(1, 3, 32, 32))
    assert first.module_paths == tuple(f"encoder.stages.0.layers.{k}" for k in range(3))
    # the first layer of the second stage halves the image: it is another one
    assert second.module_paths == tuple(f"encoder.stages.1.layers.{k}" for k in (1, 2, 3))


def test_albert_which_uses_one_layer_again() -> None:
    config = AlbertConfig(
        embedding_size=8, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=4
    )
    config.vocab_size = 10
    (found,) = repeats(AlbertModel(config), input_ids=ids())
    assert found.count == 4
    assert set(found.module_paths) == {"encoder.albert_layer_groups.0.albert_layers.0"}


def test_swin_whose_layers_come_in_pairs() -> None:
    config = SwinConfig(image_size=32, patch_size=2, embed_dim=8, depths=[1, 4], num_heads=[2, 2], window_size=4)
    found = repeats(SwinModel(config), pixel_values=torch.randn(1, 3, 32, 32))
    assert [repeat.count for repeat in found] == [2]


class Sequence(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.sum(-1)


def test_small_layers() -> None:
    (found,) = repeats(Sequence(*(nn.Linear(4, 4) for _ in range(6))), x=torch.randn(2, 4))
    assert (found.start, found.period, found.count) == (1, 2, 6)
    assert found.layers[1] == ("linear_1", "tanh_1")


def test_other_shapes_break_the_repeat() -> None:
    layers = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)]
    found = repeats(Sequence(*layers), x=torch.randn(2, 4))
    assert [(repeat.start, repeat.period, repeat.count) for repeat in found] == [(1, 2, 2), (7, 2, 3)]


def test_parallel_branches_are_no_layers() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: torch.Tensor) -> Any:
            return [torch.relu(branch(x)) for branch in self.branches]

    assert repeats(Branches(), x=torch.randn(2, 4)) == ()


def test_a_skip_from_two_layers_before_is_no_repeat() -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = torch.relu(self.layers[0](x)) + x
            second = torch.relu(self.layers[1](first)) + first
            return torch.relu(self.layers[2](second)) + x

    found = repeats(Skips(), x=torch.randn(2, 4))
    assert [repeat.count for repeat in found] == [2]


class Residual(nn.Module):
    """The sums of its layers stand in its own forward; `apart`: what makes a layer stands in two lists."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.apart = apart
        self.first = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.second = nn.ModuleList(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for first, second in zip(self.first, self.second, strict=True):
            x = x + second(first(x) if self.apart else x)
        return x


@pytest.mark.parametrize(("apart", "name"), [(False, "second"), (True, "first")])
def test_layers_without_a_module_of_their_own_have_names(apart: bool, name: str) -> None:
    graph = autopar.trace(Residual(apart), (torch.randn(4, 6),))
    (repeat,) = graph.repeats
    assert repeat.module_paths == (f"{name}.0", f"{name}.1", f"{name}.2")
    layout = f"batch -> dp; * -> none; recompute full @{name}.1"
    plan = autopar.plan(graph.model, "dp=2", (torch.randn(4, 6),), layout=layout, cache=False)
    assert plan.decided.recompute == {f"{name}.1": "full"}
    assert f"recompute full @{name}.1" in plan.text
