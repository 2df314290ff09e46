"""Which plans a search splices with each other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import autopar
from autopar.cost.hardware.cluster import load_cluster
from autopar.mesh import SubMesh
from autopar.sharding.bound_layout import BoundLayout
from autopar.sharding.layout.language import Layout
from autopar.sharding.options import TrainingOptions
from autopar.solver.model.build import build
from autopar.solver.model.objective import Sum
from autopar.solver.search import lower_memory
from autopar.solver.search.lagrangian import Candidate, LagrangianSearch
from autopar.solver.setting import PlanningProblem
from examples.gpt import gpt

AXES = {"dp": 2, "tp": 2}


def spliced(monkeypatch: pytest.MonkeyPatch, limit_gib: float) -> set[frozenset[int]]:
    """Return the pairs of four plans that are spliced; later ones are slower and take less memory."""
    pairs: set[frozenset[int]] = set()

    def noted(_: Any, first: Candidate, then: Candidate) -> Any:
        pairs.add(frozenset((first.chosen[0], then.chosen[0])))
        return SimpleNamespace(least=lambda limit: (np.inf, 0))

    monkeypatch.setattr(lower_memory, "_spliced", noted)
    ends = [Candidate([i], np.zeros(len(Sum)), 1.0 + 0.1 * i, 8.0 / 2**i) for i in range(4)]
    search: Any = SimpleNamespace(
        found={(0,): ends[0], (1,): ends[1]}, passed=ends[2:], limit_gib=limit_gib, best=1.0, gap=1e-4,
        is_closed=False, model=SimpleNamespace(variables=range(5000)),
    )  # fmt: skip
    lower_memory.splice_plans(search)
    return pairs


def test_any_two_plans_are_spliced_where_memory_is_not_short(monkeypatch: pytest.MonkeyPatch) -> None:
    assert spliced(monkeypatch, np.inf) == {frozenset((i, j)) for j in range(4) for i in range(j)}


def test_under_a_limit_plans_that_fit_are_spliced_with_those_that_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    found = spliced(monkeypatch, 3.0)
    assert found
    assert all(min(pair) < 2 <= max(pair) for pair in found)


def test_a_plan_too_slow_to_be_priced_is_kept() -> None:
    """It may overlap in some layers what the best plan does not."""
    graph = autopar.trace(*gpt(batch=4, seq=8, d_model=16, heads=2, vocab=16, layers=1))
    setting = PlanningProblem.of(graph, SubMesh.of(AXES), load_cluster("h100"), TrainingOptions())
    model = build(setting, BoundLayout(graph, Layout(()), AXES))

    def priced(_: Any) -> tuple[float, float]:
        raise AssertionError("it is hopeless")

    search = LagrangianSearch(model, priced, np.inf)
    search.best = 1e-12
    one = search.try_out([0] * len(model.variables))
    assert search.passed == [one]
    assert search.found == {}
