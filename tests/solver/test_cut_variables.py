"""Variables that are cut from a model that is too wide: which they are, and the bounds without them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.cost.hardware.cluster import load_cluster
from autopar.ir.graph import NamedGraph
from autopar.mesh import SubMesh
from autopar.sharding.bound_layout import BoundLayout
from autopar.sharding.layout.language import Layout
from autopar.sharding.options import TrainingOptions
from autopar.solver import Floats
from autopar.solver.model.build import build
from autopar.solver.model.model import Model
from autopar.solver.model.objective import MOMENTS, Hinges
from autopar.solver.search import class_tables, elimination, lagrangian
from autopar.solver.search.bucket_elimination import elimination_order
from autopar.solver.search.count_once import count_once
from autopar.solver.search.elimination import Elimination
from autopar.solver.search.lagrangian import LagrangianSearch
from autopar.solver.search.reshard_shares import ReshardShares
from autopar.solver.setting import PlanningProblem
from autopar.solver.solve import SolvedPlan, solve_plan

AXES = {"dp": 2, "tp": 2}


class Reader(nn.Module):
    """Layer that reads one value beside its own input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.own, self.read, self.out = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor, value: Tensor) -> Tensor:
        hidden: Tensor = x + self.out(torch.relu(self.own(x) + self.read(value)))
        return hidden


class Readers(nn.Module):
    """Layers that all read one value, like a decoder its encoder's result."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.layers = nn.ModuleList(Reader(width) for _ in range(layers))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        value = torch.relu(self.first(y))
        for layer in self.layers:
            x = layer(x, value)
        return x.pow(2).mean()


@pytest.fixture(scope="module")
def model() -> Model:
    return of_readers(64, AXES)


def of_readers(width: int, axes: Mapping[str, int]) -> Model:
    inputs = {name: torch.randn(16, width, device="meta") for name in "xy"}
    graph: NamedGraph = autopar.trace(Readers(4, width).to("meta"), inputs)
    setting = PlanningProblem.of(graph, SubMesh.of(axes), load_cluster("h100"), TrainingOptions())
    layout = BoundLayout(graph, Layout(()), axes)
    return build(setting, layout, regather=True, open_layers=tuple(graph.ops_of_layers))


def weights_of(model: Model, price: float) -> Floats:
    hinges = Hinges.of(model.setting)
    weights, _ = hinges.weights(np.full(len(hinges.offsets), 0.5))
    moment: Floats = MOMENTS[0]
    return weights + price * moment


def cut(model: Model, monkeypatch: pytest.MonkeyPatch, entries: int) -> Elimination:
    monkeypatch.setattr(elimination, "LARGEST_TABLE", entries)
    monkeypatch.setattr(elimination, "LARGEST_UNCUT", entries)
    return Elimination.of(model)


def test_the_value_that_all_layers_read_is_cut_and_no_mode(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Elimination.of(model)
    assert whole.cut == ()
    assert not whole.is_rough
    narrow = cut(model, monkeypatch, whole.plan.largest // 8)
    assert narrow.plan.largest <= whole.plan.largest // 8
    assert narrow.is_rough
    assert ("value", "/relu") in {(model.variables[node].kind, model.variables[node].name) for node in narrow.cut}
    assert not any(model.variables[node].kind == "recompute" for node in narrow.cut)


def test_no_mode_is_cut_however_narrow(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = cut(model, monkeypatch, 60)
    assert len(narrow.cut) > 10
    assert not any(model.variables[node].kind == "recompute" for node in narrow.cut)


@pytest.mark.parametrize("price", [0.0, 1e-4, 1e-1])
def test_elimination_by_classes_cuts_no_gradient(model: Model, monkeypatch: pytest.MonkeyPatch, price: float) -> None:
    """It finds the least of the whole model, recompute modes included, with shared reshards and without."""
    weights, shares = weights_of(model, price), ReshardShares(model)
    whole = Elimination.of(model)
    narrow = cut(model, monkeypatch, whole.plan.largest // 8)
    classes = narrow.by_classes()
    assert not classes.is_rough
    # With the same cut, by states.
    plan = elimination_order(
        [1 if node in classes.cut else len(each.states) for node, each in enumerate(model.variables)],
        [left for scope in whole.scopes if (left := tuple(node for node in scope if node not in classes.cut))],
    )
    whole = Elimination(model, whole.scopes, classes.cut, plan)
    least = whole.least(weights)
    found = classes.least(weights)
    assert found.value == pytest.approx(least.value, rel=1e-4)
    assert found.value <= least.value
    assert found.sums == pytest.approx(least.sums, rel=1e-5)
    once = whole.least(weights, shares).value
    assert classes.least(weights, shares).value == pytest.approx(once, rel=1e-4)
    assert narrow.least(weights, shares).value < once, "the cut costs something"


def test_variables_are_cut_where_classes_are_too_wide(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as before at most; else the elimination by states stays."""
    weights = weights_of(model, 1e-4)
    whole = Elimination.of(model)
    narrow = cut(model, monkeypatch, whole.plan.largest // 8)
    monkeypatch.setattr(class_tables, "LARGEST_STEP", whole.plan.largest // 64)
    assert narrow.by_classes() is narrow
    monkeypatch.setattr(class_tables, "LARGEST_STEP", whole.plan.largest // 16)
    classes = narrow.by_classes()
    assert isinstance(classes.plan, class_tables.ClassTables)
    assert 0 < len(classes.cut) <= len(narrow.cut)
    found = classes.least(weights)
    assert found.value <= whole.least(weights).value
    settled = classes.settled(found.chosen, weights)
    assert weights @ model.sums(settled) >= found.value
    untouched = set(range(len(settled))).difference(classes.cut)
    assert all(settled[node] == found.chosen[node] for node in untouched)


def test_rounds_of_a_bound_are_at_the_least_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plane in which shared reshards count once is none of the model's: where they cost much, it leads astray."""
    model = of_readers(2048, {"dp": 4, "tp": 8})
    narrow = cut(model, monkeypatch, Elimination.of(model).plan.largest // 8)
    assert narrow.is_rough

    def report(chosen: Sequence[int]) -> tuple[float, float]:
        return search.hinges.seconds(model.sums(chosen) - search.shares.counted_again(chosen)), 0.0

    search = LagrangianSearch(model, report, np.inf)
    search.run()
    count_once(search)
    rough = search.bound
    assert search.refine()
    count_once(search)
    gaps = [(search.best - bound) / search.best for bound in (rough, search.bound)]
    assert gaps[0] > 0.02
    assert gaps[1] < 1e-4


def test_a_search_of_a_wide_model_proves_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """With variables cut, the search ends with elimination by classes, and the same plan and bound."""
    graph = autopar.trace(Readers(4, 64), {"x": torch.randn(16, 64), "y": torch.randn(16, 64)})
    cluster = load_cluster("h100")

    def solved() -> SolvedPlan:
        return solve_plan(graph, SubMesh.of(AXES), cluster, strategies=False)

    whole = solved()
    entries = 300
    monkeypatch.setattr(elimination, "LARGEST_TABLE", entries)
    monkeypatch.setattr(elimination, "LARGEST_UNCUT", entries)
    monkeypatch.setattr(lagrangian, "CLOSE", 0.0)
    used = []
    refined = Elimination.by_classes

    def by_classes(given: Elimination) -> Elimination:
        used.append(given)
        return refined(given)

    monkeypatch.setattr(Elimination, "by_classes", by_classes)
    narrow = solved()
    assert used
    assert narrow.costs.step_seconds == pytest.approx(whole.costs.step_seconds, rel=1e-3)
    assert narrow.bound_seconds == pytest.approx(whole.bound_seconds, rel=1e-3)
