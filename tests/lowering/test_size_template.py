"""Templates of sizes: integers that grow with a size, in plain objects and in generated code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
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

    template = SizeTemplate.of([8], [32], {(): made(8), (0,): made(40)}, made(24))
    assert template.is_linear
    for size in (12, 16, 20, 36):
        assert template.at(size) == made(size)
        template.check(made(size), size)
    # 13 // 4 is 3, on no line through 8 // 4 and 40 // 4.
    with pytest.raises(DiffersError, match="no integer"):
        template.at(13)
    with pytest.raises(DiffersError, match="is 99 at the sizes \\(16,\\), expected 16"):
        template.check(made(16) | {"capped": 99}, 16)


def test_areas_are_no_lines() -> None:
    template = SizeTemplate.of([2], [6], {(): (4, 2), (0,): (64, 8)}, (25, 5))
    assert not template.is_linear
    assert [template.at(size)[0] for size in range(2, 12)] == [size * size for size in range(2, 12)]


def of_two(made: Callable[[int, int], Any]) -> SizeTemplate:
    """The template of an object at 4 to 8 and 10 to 30."""
    corners = {(): made(4, 10), (0,): made(8, 10), (1,): made(4, 30), (0, 1): made(8, 30)}
    return SizeTemplate.of([4, 10], [4, 20], corners, made(6, 20))


def test_sizes_that_vary_freely_and_their_products() -> None:
    def made(batch: int, length: int) -> Any:
        return {"shape": (batch, length, 7), "rows": [batch * length, (batch - 1) * (length - 2)], "half": length // 2}

    template = of_two(made)
    assert template.is_linear
    for batch, length in product((1, 4, 5, 7, 8, 11), (2, 10, 12, 28, 30, 100)):
        assert template.at(batch, length) == made(batch, length)
        template.check(made(batch, length), batch, length)
    with pytest.raises(DiffersError, match="no integer"):
        template.at(5, 11)
    with pytest.raises(DiffersError, match=r"at the sizes \(5, 12\), expected 60"):
        template.check({**made(5, 12), "rows": [61, 40]}, 5, 12)


@pytest.mark.parametrize(
    "made", [lambda a, b: a * a, lambda a, b: min(3 * a, b), lambda a, b: max(a, b - 8), lambda a, b: b * b * a]
)
def test_what_is_not_linear_in_each_size(made: Callable[[int, int], int]) -> None:
    with pytest.raises(DiffersError, match="not linear in each of 2 sizes"):
        of_two(made)


def test_generated_code_is_shared_between_sizes() -> None:
    template = SizeTemplate.of([4], [4], {(): generated(4), (0,): generated(8)}, generated(6))
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
        SizeTemplate.of([1], [2], {(): Running(1), (0,): Running(3)}, Running(2))
