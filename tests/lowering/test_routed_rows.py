"""Routed rows on simulated ranks: every way to their experts and back gives the numbers of one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import LayoutError
from autopar.lowering.emit import emit
from autopar.lowering.modules.routed_ops import DispatchRows
from autopar.mesh import SubMesh
from autopar.sharding.assignment import Assignment
from autopar.sharding.layout.language import parse_layout
from autopar.sharding.propagation import propagate
from autopar.sharding.reshard_insertion import inserted_reshards
from tests.ranks import difference_of, on_ranks

pytest.importorskip("transformers.integrations.moe")
PRODUCT = "transformers.grouped_mm_fallback.default"  # torch's own has no float64
EXPERTS, BATCH, SEQ, D, F = 4, 4, 6, 4, 8


class Experts(nn.Module):
    """Two products by expert with an op between them, in the order of the tokens."""

    def __init__(self, experts: int = EXPERTS) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, D, F))
        self.down = nn.Parameter(torch.randn(experts, F, D))
        self.bias = nn.Parameter(torch.randn(experts, D))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        rows, key = x.reshape(-1, D), chosen.reshape(-1)
        hidden = torch.ops.autopar.expert_rows(rows, self.up, key, PRODUCT).tanh()
        found = torch.ops.autopar.expert_rows(hidden, self.down, key, PRODUCT) + self.bias[key]
        return found.reshape(x.shape).square()


DIMS = {"x": "batch seq d", "chosen": "batch seq", "up": "expert d f", "down": "expert f d", "bias": "expert d"}
ROUTINGS = {
    "uneven": torch.tensor([0, 3, 3, 2, 3, 0] * BATCH).reshape(BATCH, SEQ),
    "one": torch.full((BATCH, SEQ), 2),
    "mixed": torch.randint(EXPERTS, (BATCH, SEQ), generator=torch.Generator().manual_seed(0)),
}
LAYOUTS = {
    "rows split, experts whole": "batch -> a; seq -> b",
    "to the experts and back": "batch -> a; expert -> a",
    "rows of ranks interleave": "seq -> a; expert -> a",
    "selected": "expert -> a",
    "selected along one axis": "batch -> b; expert -> a*b",
    "both axes, of two dims": "batch -> b; seq -> a; expert -> a*b",
    "experts beside split tokens": "batch -> b; expert -> a",
    "back into another split": "@*dispatch { seq -> a; expert -> none }; @*combine { batch -> a }; expert -> a",
    "back as sums": "@*dispatch { batch -> a; expert -> none }; @*combine { batch -> none }; expert -> a",
    "inside of experts too": "batch -> a; expert -> a; f -> b",
    "width split": "batch -> a; expert -> a; d -> b",
}


def traced(routing: str, experts: int = EXPERTS) -> tuple[autopar.NamedGraph, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    inputs = torch.randn(BATCH, SEQ, D, dtype=torch.float64, requires_grad=True), ROUTINGS[routing]
    return autopar.trace(Experts(experts).double(), inputs, dims=DIMS), inputs


def assigned(graph: autopar.NamedGraph, layout: str) -> Assignment:
    return propagate(graph, parse_layout(layout), SubMesh({"a": 2, "b": 2}))


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_all_ways_give_the_same(layout: str, routing: str) -> None:
    graph, inputs = traced(routing)
    assert difference_of(graph, assigned(graph, layout), inputs) < 1e-12


def test_axes_of_one_rank_change_nothing() -> None:
    graph, inputs = traced("mixed")
    layout = parse_layout("batch -> one*a; expert -> a*one")
    assert difference_of(graph, propagate(graph, layout, SubMesh({"one": 1, "a": 2})), inputs) < 1e-12
    layout = parse_layout("batch -> one; expert -> one")
    assert difference_of(graph, propagate(graph, layout, SubMesh({"one": 1})), inputs) < 1e-12


def test_one_dispatch_serves_the_block() -> None:
    graph, _ = traced("mixed")
    found = [node.op.split(".")[1] for node in graph.nodes if node.routed]
    assert found == ["dispatch", "grouped", "tanh", "grouped", "combine"]


class LowRank(Experts):
    """A frozen first product with a pair of narrow ones beside it, as LoRA adds them."""

    def __init__(self) -> None:
        super().__init__()
        self.up.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(EXPERTS, D, 2))
        self.b = nn.Parameter(torch.randn(EXPERTS, 2, F))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        rows, key, multiply = x.reshape(-1, D), chosen.reshape(-1), torch.ops.autopar.expert_rows
        added = multiply(multiply(rows, self.a, key, PRODUCT), self.b, key, PRODUCT)
        hidden = multiply(rows, self.up, key, PRODUCT) + added
        return multiply(hidden.tanh(), self.down, key, PRODUCT).reshape(x.shape).square()  # type: ignore[no-any-return]


@pytest.mark.parametrize("layout", ["batch -> a; expert -> a", "expert -> a*b"])
def test_narrow_products_share_the_dispatch(layout: str) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(BATCH, SEQ, D, dtype=torch.float64, requires_grad=True), ROUTINGS["mixed"]
    dims = {"x": "batch seq d", "chosen": "batch seq", "up": "expert d f"}
    graph = autopar.trace(LowRank().double(), inputs, dims=dims)
    assert [node.op for node in graph.nodes].count("autopar.dispatch.default") == 1
    assert difference_of(graph, assigned(graph, layout), inputs) < 1e-12


class TwoEach(Experts):
    """Two experts for each token; `how` says what else reads the rows of tokens."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        tokens = x.reshape(-1, D)
        wide = tokens.unsqueeze(1).expand(-1, 2, -1).reshape(-1, D)
        if self.how == "by repeat_interleave":
            wide = tokens.repeat_interleave(2, 0)
        key = chosen.reshape(-1)
        hidden = torch.ops.autopar.expert_rows(wide, self.up, key, PRODUCT).tanh()
        found = torch.ops.autopar.expert_rows(hidden, self.down, key, PRODUCT)
        if self.how == "rows read again":
            found = found + wide
        if self.how == "tokens read again":
            found = found + 2 * tokens.repeat_interleave(2, 0)
        return found.reshape(-1, 2, D).sum(1)


REPEATS = {"plain": 2, "by repeat_interleave": 2, "tokens read again": 2, "rows read again": 1}


@pytest.mark.parametrize("how", REPEATS)
@pytest.mark.parametrize("layout", ["batch -> a; expert -> a", "batch -> a", "expert -> a*b"])
def test_rows_of_tokens_are_dispatched_without_copies(layout: str, how: str) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(BATCH, SEQ, D, dtype=torch.float64, requires_grad=True), torch.randint(4, (BATCH, SEQ, 2))
    dims = {"x": "batch seq d", "chosen": "batch seq each", "up": "expert d f"}
    graph = autopar.trace(TwoEach(how).double(), inputs, dims=dims)
    assignment = assigned(graph, layout)
    assert difference_of(graph, assignment, inputs) < 1e-12
    made = on_ranks(assignment.axes, lambda groups: emit(graph, assignment, groups, "full", False))
    for one in made:
        modules = one.graph_module.modules()
        assert {module.repeats for module in modules if isinstance(module, DispatchRows)} == {REPEATS[how]}


def exchanges(layout: str) -> list[str]:
    graph, _ = traced("mixed")
    found = inserted_reshards(graph, assigned(graph, layout))
    return [direction for one in found for direction, step in one.collectives() if step.kind.value == "all_to_all"]


def test_rows_are_sent_there_and_back() -> None:
    assert sorted(exchanges("batch -> a; expert -> a")) == ["backward"] * 2 + ["forward"] * 2
    assert exchanges("expert -> a") == []


def test_experts_that_the_axis_does_not_divide() -> None:
    graph, _ = traced("uneven", experts=5)
    with pytest.raises(LayoutError, match="a = 2 does not divide 5"):
        assigned(graph, "expert -> a")
