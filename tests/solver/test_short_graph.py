"""Short graphs: a plan of a few layers is the plan of all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.ir.graph import NamedGraph
from autopar.ir.short_graph import FIRST, LAST, shorten
from autopar.mesh import SubMesh
from autopar.sharding.layout.language import choose_layout
from autopar.sharding.layout.syntax import MicroBatches
from autopar.sharding.time_slice import propagate_plan
from autopar.sharding.verify import verify_assignment
from autopar.solver.segments import segments_of, spread
from examples.gpt import gpt
from examples.hf import hf

MESH = SubMesh({"dp": 2, "tp": 2})
LAYERS = 6


def traced(name: str) -> NamedGraph:
    if name == "gpt":
        return autopar.trace(*gpt(layers=LAYERS, batch=8, device="meta"))
    if name == "llama with keys and values":
        model, inputs = hf("llama", batch=8, num_hidden_layers=LAYERS)
        model.config.use_cache = True
        return autopar.trace(model, inputs)
    layers = {"t5": ("num_layers", "num_decoder_layers"), "gpt2": ("n_layer",)}.get(name, ("num_hidden_layers",))
    return autopar.trace(*hf(name, batch=8, **dict.fromkeys(layers, LAYERS)))


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("gpt", "megatron(dp=dp, tp=tp)"),
        ("gpt", "fsdp(fsdp=dp*tp)"),
        ("llama", "megatron_sp(dp=dp, tp=tp)"),
        ("llama with keys and values", "fsdp_tp(fsdp=dp, tp=tp)"),
        pytest.param("t5", "megatron(dp=dp, tp=tp)", marks=pytest.mark.slow),
        pytest.param("gpt2", "fsdp(fsdp=dp*tp)", marks=pytest.mark.slow),
        pytest.param("bert", "megatron(dp=dp, tp=tp)", marks=pytest.mark.slow),
        pytest.param("mixtral", "fsdp(fsdp=dp*tp)", marks=pytest.mark.slow),
    ],
)
def test_a_layout_decides_the_same_for_all_layers(model: str, layout: str) -> None:
    """Propagation of a layout on the short graph, spread over all layers, is that on the whole graph."""
    graph = traced(model)
    short = shorten(graph)
    assert short is not None
    assert len(short.graph.nodes) < len(graph.nodes)
    for repeat in short.graph.repeats:
        assert repeat.count <= FIRST + LAST
    given = choose_layout(layout, MESH)
    whole = propagate_plan(graph, given, MESH)
    found = spread(short, propagate_plan(short.graph, given, MESH))
    verify_assignment(graph, found.assignment)
    for part in ("stored", "values", "ops", "gather_policies"):
        ours, theirs = getattr(found.assignment, part), getattr(whole.assignment, part)
        assert ours.keys() == theirs.keys()
        assert [name for name in ours if ours[name] != theirs[name]] == []
    assert found.graph == whole.graph
    assert replace(found, assignment=whole.assignment) == whole


@pytest.mark.parametrize("model", ["gpt", pytest.param("t5", marks=pytest.mark.slow)])
def test_the_counts_of_layers_add_up(model: str) -> None:
    """Each layer of the whole model has one that stands for it, and segments are layers and what is between."""
    graph = traced(model)
    short = shorten(graph)
    assert short is not None
    stacks = [repeat for repeat in graph.repeats if repeat.count > FIRST + LAST]
    assert sum(short.counts.values()) == sum(repeat.count for repeat in graph.repeats)
    assert len(graph.nodes) - len(short.graph.nodes) == sum(
        sum(node.node in set(repeat.layers[FIRST]) for node in graph.nodes) * (repeat.count - FIRST - LAST)
        for repeat in stacks
    )
    whole = segments_of(graph, MicroBatches(2, "batch"))
    paths = [path for path, _ in whole if path]
    assert paths == [path for repeat in graph.repeats for path in repeat.module_paths]
    outside = [ops for path, ops in whole if not path]
    assert outside == [ops for path, ops in segments_of(short.graph, MicroBatches(2, "batch")) if not path]


def test_what_layers_return_goes_with_them() -> None:
    """A model that returns keys and values of all layers is cut as one that returns only its loss and logits."""
    graph, plain = traced("llama with keys and values"), traced("llama")
    short, other = shorten(graph), shorten(plain)
    assert short is not None
    assert other is not None
    assert len(graph.outputs) - len(plain.outputs) == 2 * LAYERS
    assert len(short.graph.outputs) - len(other.graph.outputs) == 2 * (FIRST + LAST)
    assert [node.name for node in short.graph.nodes] == [node.name for node in other.graph.nodes]


class Collects(nn.Module):
    """Model that returns what each of its layers makes, or only that of the last."""

    def __init__(self, collects: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(LAYERS))
        self.collects = collects

    def forward(self, x: Tensor) -> Tensor:
        made = []
        for layer in self.layers:
            x = x + layer(x)
            made.append(x)
        return torch.stack(made).square().mean() if self.collects else x.square().mean()


def test_layers_that_others_read_stay() -> None:
    """A stack whose layers are read from outside is not cut; the same stack without such readers is."""
    inputs = (torch.empty(4, 8),)
    assert shorten(autopar.trace(Collects(True), inputs)) is None
    assert shorten(autopar.trace(Collects(False), inputs)) is not None
