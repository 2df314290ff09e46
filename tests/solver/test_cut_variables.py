"""Variables that are cut from a model that is too wide: which they are, and the bounds without them."""

from __future__ import annotations

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
from autopar.solver.model.recompute_variables import layers_of
from autopar.solver.search import elimination
from autopar.solver.search.elimination import Elimination
from autopar.solver.search.reshard_shares import ReshardShares
from autopar.solver.setting import PlanningProblem

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
    graph: NamedGraph = autopar.trace(Readers(4, 64), {"x": torch.randn(16, 64), "y": torch.randn(16, 64)})
    setting = PlanningProblem.of(graph, SubMesh.of(AXES), load_cluster("h100"), TrainingOptions())
    layout = BoundLayout(graph, Layout(()), AXES)
    return build(setting, layout, regather=True, open_layers=layers_of(graph))


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
    assert whole.hub is None
    narrow = cut(model, monkeypatch, whole.plan.largest // 8)
    assert narrow.plan.largest <= whole.plan.largest // 8
    assert narrow.hub is not None
    hub = model.variables[narrow.hub]
    assert (hub.kind, hub.name) == ("value", "/relu")
    assert not any(model.variables[node].kind == "recompute" for node in narrow.cut)


@pytest.mark.parametrize("price", [0.0, 1e-4, 1e-1])
def test_the_bound_by_the_states_of_the_hub_lies_between(
    model: Model, monkeypatch: pytest.MonkeyPatch, price: float
) -> None:
    weights, shares = weights_of(model, price), ReshardShares(model)
    whole = Elimination.of(model)
    least, _ = whole.least_once(weights, shares)
    narrow = cut(model, monkeypatch, whole.plan.largest // 8)
    by_hub = list(narrow.least_by_hub(weights, shares))
    assert narrow.hub is not None
    assert len(by_hub) == len(model.variables[narrow.hub].states)
    assert narrow.least_once(weights, shares)[0] <= min(by_hub) * (1 + 1e-9)
    assert min(by_hub) <= least * (1 + 1e-9)
    assert narrow.least_once(weights, shares)[0] < least, "the cut costs something"
