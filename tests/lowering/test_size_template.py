"""Templates of sizes: integers that grow with a size, in plain objects and in generated code."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule

from autopar.lowering.modules.run_state import RUN_STATE
from autopar.lowering.size_template import DiffersError, SizeTemplate, differences


@dataclass(frozen=True)
class Part:
    length: int
    shape: tuple[int, ...] = ()
    name: str = "part"


@dataclass
class Running:
    length: int
    latest: Any = field(default=None, metadata=RUN_STATE)


class Holder(nn.Module):
    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.kept = kept

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.kept.length


def generated(size: int) -> GraphModule:
    """A graph that reads `size` rows and half of them, and multiplies by what a module holds."""
    graph = Graph()
    x = graph.placeholder("x")
    some = graph.call_function(torch.narrow, (x, 0, 0, size))
    half = graph.call_function(torch.narrow, (some, 0, 0, -(-size // 2)))
    result = graph.call_module("holder", (half,))
    graph.output((result,))
    return GraphModule({"holder": Holder(Part(size))}, graph)


def test_a_template_gives_the_objects_between_its_sizes() -> None:
    def made(size: int) -> Any:
        return {"part": Part(3 * size, (4, size)), "capped": min(size, 100), "rest": [size // 4, True, 1.5]}

    template = SizeTemplate.of(8, 16, made(8), made(24), made(40))
    assert template.is_linear
    for size in (12, 16, 20, 36):
        assert template.at(size) == made(size)
        template.check(made(size), size)
    # 13 // 4 is 3, on no line through 8 // 4 and 40 // 4.
    with pytest.raises(DiffersError, match="no integer"):
        template.at(13)
    with pytest.raises(DiffersError, match="is 99 at the size 16, expected 16"):
        template.check(made(16) | {"capped": 99}, 16)


def test_areas_are_no_lines() -> None:
    template = SizeTemplate.of(2, 3, (4, 2), (25, 5), (64, 8))
    assert not template.is_linear
    assert [template.at(size)[0] for size in range(2, 12)] == [size * size for size in range(2, 12)]


def test_generated_code_is_shared_between_sizes() -> None:
    template = SizeTemplate.of(4, 2, *map(generated, (4, 6, 8)))
    x = torch.arange(20.0)
    modules = [template.at(size) for size in (4, 10, 12)]
    for module, size in zip(modules, (4, 10, 12), strict=True):
        assert torch.equal(module(x)[0], generated(size)(x)[0])
    assert len({type(module) for module in modules}) == 1
    with pytest.raises(DiffersError, match="no integer"):
        template.at(5)


@pytest.mark.parametrize(
    ("one", "other", "where"),
    [
        ((1.0, 2), (1.5, 2), "1.0 and 1.5"),
        ([1], [1, 2], "parts"),
        (Part(1), Part(1, name="other"), "'part' and 'other'"),
        (True, 1, "bool and int"),
        (torch.ones(2), torch.zeros(2), "two tensors"),
        (Holder(next(iter(Graph().nodes), Graph().placeholder("x"))), Holder(Graph().placeholder("x")), "the nodes"),
    ],
)
def test_other_differences_are_no_template(one: Any, other: Any, where: str) -> None:
    with pytest.raises(DiffersError, match=where):
        differences(one, other)


def test_what_changes_while_a_module_runs_does_not_count() -> None:
    assert differences(Running(1, latest=torch.ones(1)), Running(2)) == {("length",): (1, 2)}
    with pytest.raises(DiffersError, match="Running has a state"):
        SizeTemplate.of(1, 1, Running(1), Running(2), Running(3))
