"""What is computed again: which layers a layout means, which ops of them, and what of the model's own checkpoints."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.errors import LayoutError
from autopar.ir.graph import NamedGraph
from autopar.sharding.layout.language import parse_layout
from autopar.sharding.layout.parameter_storage import recompute_of
from autopar.sharding.recompute import recompute_regions, recomputed_ops
from autopar.sharding.time_slice import propagate_plan

LAYERS = ("blocks.0", "blocks.1", "blocks.10", "head")


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ("* -> none", {}),
        ("recompute full @blocks.*", {"blocks.0": "full", "blocks.1": "full", "blocks.10": "full"}),
        ("recompute full @blocks.1*; recompute none @blocks.10", {"blocks.1": "full", "blocks.10": "none"}),
        ("recompute none @head; recompute selective @head*", {"head": "none"}),
        ("recompute selective @blocks.1; keep @blocks.*", {"blocks.1": "selective"}),
    ],
)
def test_which_layers(lines: str, found: dict[str, str]) -> None:
    assert recompute_of(parse_layout(lines), LAYERS) == found


def test_two_ways_for_one_layer() -> None:
    with pytest.raises(LayoutError) as error:
        recompute_of(parse_layout("recompute full @blocks.*\nrecompute selective @*.1", "my.lay"), LAYERS)
    assert str(error.value) == (
        "E2: the layer blocks.1 is to be computed again in two ways by equally specific lines\n"
        "  my.lay:1 | recompute full @blocks.*\n"
        "           | ^\n"
        "  my.lay:2 | recompute selective @*.1\n"
        "           | ^\n"
        "fix: drop one, or write 'recompute full @blocks.1', which beats a pattern"
    )


class Attention(nn.Module):
    """Attention that is written out, between a norm and a map."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)
        self.checkpointed = checkpointed

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return torch.softmax(q @ k.transpose(1, 2), -1) @ v

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y = checkpoint(self.attend, y, use_reentrant=False) if self.checkpointed else self.attend(y)
        return x + self.out(y)  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Attention(checkpointed) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


def traced(checkpointed: bool = False) -> NamedGraph:
    return autopar.trace(Model(checkpointed), (torch.randn(2, 4, 8),), dims={"x": "batch seq d"})


def test_selective_keeps_what_is_dear() -> None:
    graph = traced()
    (first, *_) = recompute_regions(graph, {"blocks.0": "selective"})
    again = recomputed_ops(graph, (first,))
    kept = [node.op for node in graph.nodes if node.name in first.ops and node.name not in again]
    assert kept == ["aten.linear.default"] * 2, "products of two values are computed again"
    assert recomputed_ops(graph, (replace(first, mode="full"),)) == set(first.ops)


@pytest.mark.parametrize(
    ("items", "named"),
    [
        ("product", ("qkv/linear", "out/linear")),
        ("product every 2", ("qkv/linear",)),
        ("@*.out/linear, softmax", ("/softmax", "out/linear")),
        ("matmul every 2, @*qkv*", ("qkv/linear", "/matmul")),
    ],
)
def test_a_list_names_ops(items: str, named: tuple[str, ...]) -> None:
    graph = traced()
    kept, only = (
        recomputed_ops(graph, recompute_regions(graph, recompute_of(parse_layout(text), ("blocks.1",))))
        for text in (f"recompute keep({items}) @blocks.1", f"recompute only({items}) @blocks.*")
    )
    assert [name for name in graph.ops_of_layers["blocks.1"] if name in only] == [
        name for name in graph.ops_of_layers["blocks.1"] if name.removeprefix("blocks.1").lstrip(".") in named
    ]
    assert kept.isdisjoint(only)
    assert kept | only == set(graph.ops_of_layers["blocks.1"])


def test_layers_of_one_path_are_regions_of_their_own() -> None:
    graph = traced()
    (repeat,) = graph.repeats
    graph = replace(graph, repeats=(replace(repeat, module_paths=("blocks",) * 3),))
    regions = recompute_regions(graph, {"blocks": "full"})
    assert len(regions) == 3
    assert len({op for region in regions for op in region.ops}) == sum(len(region.ops) for region in regions)


def test_a_checkpoint_of_the_model_within_a_layer_is_part_of_it() -> None:
    graph = traced(checkpointed=True)
    own = recompute_regions(graph, {})
    assert [region.mode for region in own] == ["full"] * 3
    one, *others = recompute_regions(graph, {"blocks.0": "selective"})
    assert (one.name, one.mode) == ("blocks.0", "selective")
    assert set(own[0].ops) < set(one.ops)
    assert others == list(own[1:])


def test_a_plan_and_its_decisions_say_the_same() -> None:
    graph = traced()
    plan = propagate_plan(graph, parse_layout("* -> none; recompute full @blocks.0"), {"dp": 2})
    assert plan.recompute == plan.assignment.recompute == {"blocks.0": "full"}
    other = plan.with_recompute({"blocks.1": "selective"})
    assert other.assignment.recompute == {"blocks.1": "selective"}
