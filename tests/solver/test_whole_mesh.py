"""The bound over all choices of a mesh of three axes."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

import autopar
from autopar.cost.hardware.cluster import load_cluster
from autopar.ir.graph import NamedGraph
from autopar.ir.precision import OWN, PRESETS, Precision, parse_precision
from autopar.mesh import Mesh
from autopar.sharding.bound_layout import BoundLayout
from autopar.sharding.layout.language import Layout
from autopar.sharding.options import TrainingOptions
from autopar.solver.model.build import build, plan_of
from autopar.solver.model.objective import Hinges, Sum
from autopar.solver.model.relaxed_tables import RelaxedTables
from autopar.solver.search import elimination, lagrangian, phases, whole_mesh
from autopar.solver.search.elimination import Elimination
from autopar.solver.search.relaxed_model import RelaxedModel
from autopar.solver.search.reshard_shares import ReshardShares
from autopar.solver.setting import PlanningProblem
from autopar.solver.solve import SolvedPlan, solve_plan
from examples.gpt import gpt
from examples.mlp import mlp
from tests.solver.random_problems import drawn
from tests.solver.test_shared_reshards import fan_out, with_memory


def mixtral() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.MixtralConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        use_cache=False,
    )
    with torch.device("meta"):
        ids = torch.zeros(16, 32, dtype=torch.long)
        return transformers.MixtralForCausalLM(config), {"input_ids": ids, "labels": ids}


MODELS = {
    "gpt": lambda: gpt(layers=2, d_model=96, heads=3, vocab=257, seq=64, batch=16),
    "mixtral": mixtral,
    "mlp": mlp,
}


NARROW = parse_precision("fp8, gathers=fp8")


def problem(graph: NamedGraph, mesh: str, micro_batches: int = 1, precision: Precision = OWN) -> PlanningProblem:
    made = Mesh(mesh)
    options = TrainingOptions(links=made.links, micro_batches=micro_batches, precision=precision)
    return PlanningProblem.of(graph, made.whole, load_cluster("h100"), options)


def free(setting: PlanningProblem) -> BoundLayout:
    return BoundLayout(setting.graph, Layout(()), setting.axes)


@pytest.mark.parametrize("name", ["gpt", pytest.param("mixtral", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("micro_batches", "precision"), [(1, OWN), (1, PRESETS["bf16"]), (4, PRESETS["bf16"]), (1, NARROW)]
)
def test_no_relaxed_cost_exceeds_the_exact_one(name: str, micro_batches: int, precision: Precision) -> None:
    """By every sum, of the forward and of the backward, of values and of parameters."""
    graph = autopar.trace(*MODELS[name](), precision=precision)
    setting = problem(graph, "dp=2,cp=2,tp=4", micro_batches, precision)
    tables = RelaxedTables(setting)
    build(setting, free(setting), tables, has_shared_states=False)
    rng, checked, cast = random.Random(0), 0, Counter[Sum]()
    for one in tables.relaxed.values():
        if not one.is_exact.size:
            continue
        rows, columns = (np.array(sorted(rng.sample(range(count), min(count, 8)))) for count in one.is_exact.shape)
        at = np.ix_(rows, columns)
        before = {key: values[at] for key, values in one.parts.items()}
        one.price(rows, columns)
        reached = one.parts[Sum.FORBIDDEN][at] == 0.0
        for key, values in before.items():
            assert np.all((values <= one.parts[key][at] * (1 + 1e-9))[reached]), key
            cast[key] += float(values[reached].sum())
        assert np.all(before[Sum.FORBIDDEN] <= one.parts[Sum.FORBIDDEN][at])
        checked += int(sum((values > 0.0).sum() for values in before.values()))
    assert checked > 1000
    assert (cast[Sum.DEVICE_ONCE] > 0.0) == (precision != OWN), "casts are counted from the beginning"


@pytest.mark.parametrize("mesh", ["dp=2,tp=4", "dp=8"])
def test_the_last_round_has_the_bound_of_the_exact_model(mesh: str) -> None:
    """On two axes all reshards can be priced. Cut values and shares are those of the relaxed model."""
    graph = autopar.trace(*MODELS["gpt"]())
    setting = problem(graph, mesh)
    found = solve_plan(graph, setting.axes, setting.cluster, options=setting.options, memory_bytes=1e15)
    tables = RelaxedTables(setting)
    relaxed = RelaxedModel(build(setting, free(setting), tables, has_shared_states=False), tables, found.plan)
    hinges = Hinges.of(setting)
    weights, constant = hinges.weights(np.full(len(hinges.offsets), 0.5))
    bounds = []
    for _ in range(100):
        value, chosen = relaxed.least(weights)
        bounds.append(value + constant)
        if not relaxed.price(chosen, weights):
            break
    else:
        raise AssertionError("the rounds do not end")
    assert len(bounds) > 1
    assert bounds == sorted(bounds)
    exact = build(setting, free(setting), has_shared_states=False)
    least = Elimination.of(exact).least(weights).value + constant
    assert bounds[-1] <= least
    assert bounds[-1] == pytest.approx(least, rel=0.03)


@pytest.mark.parametrize("slower", [1.0, 1e5])
def test_no_share_exceeds_what_ops_pay_together(slower: float) -> None:
    """All reshards are priced; random assignments cost no more than where shared reshards count once."""
    checked = tight = 0
    for seed in (1, 8, 21, 36):
        draw = random.Random(seed)
        for axes in ({"a": 2}, {"a": 2, "b": 4}):
            given = with_memory(replace(drawn(fan_out(seed), axes, draw), layout=Layout(())), slower)
            setting, layout = given.setting, given.bound_layout
            tables, exact = RelaxedTables(setting), build(setting, layout, has_shared_states=False)
            model, shares = build(setting, layout, tables, has_shared_states=False), ReshardShares(exact)
            weights = Hinges.of(setting).weights(np.full(len(Hinges.of(setting).offsets), 0.5))[0]
            for number in range(16):
                plan, chosen = ([draw.randrange(len(one.states)) for one in model.variables] for _ in range(2))
                plan = chosen if number % 2 else plan
                relaxed = RelaxedModel(model, tables, plan_of(exact, plan))
                found = sum(float(weights @ one.at(state)) for one, state in zip(model.variables, chosen, strict=True))
                for factor, share in zip(relaxed.factors, relaxed.shares, strict=True):
                    costs = tables.relaxed[id(factor.table.parts)]
                    costs.price(np.arange(len(costs.rows)), np.arange(len(costs.columns)))
                    row, column = (chosen[node] for node in factor.scope)
                    paid = share.paid(factor.table.parts, weights)
                    found += float(paid[factor.table.rows[row], factor.table.columns[column]])
                sums = exact.sums(chosen) - shares.counted_again(chosen)
                if sums[Sum.FORBIDDEN] < 0.5:
                    assert found <= weights @ sums * (1 + 1e-6)
                    checked += 1
                    tight += bool(shares.counted_again(chosen).any()) and found > (1 - 1e-6) * weights @ sums
    assert checked > 20
    assert tight > 5


@pytest.mark.parametrize("name", ["mlp", pytest.param("gpt", marks=pytest.mark.slow)])
def test_a_mesh_of_three_axes_is_proved(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is one of all choices, and of no part of them: the search of two axes as one finds nothing below."""
    monkeypatch.setattr(phases, "SMALL", 0)  # no graph is searched whole
    monkeypatch.setattr(whole_mesh, "PATIENCE", 100.0)
    graph = autopar.trace(*MODELS[name]())
    found = solved(graph, "pod=2,dp=2,tp=2")
    assert found.bound_by == "search"
    assert 0.0 < found.gap < 0.1
    for mesh in ("dp=4,tp=2", "dp=2,tp=4", "dp=8"):
        assert found.bound_seconds <= solved(graph, mesh).costs.step_seconds


def test_a_model_that_is_too_wide_by_options_is_searched_by_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With variables cut that have a gradient, the search alone finds slower plans and proves less."""
    graph = autopar.trace(*gpt(layers=2, d_model=1024, heads=16, vocab=32000, seq=512, batch=64))
    usual = solved(graph, "dp=2,tp=4")
    monkeypatch.setattr(elimination, "LARGEST_TABLE", 2**8)
    monkeypatch.setattr(elimination, "LARGEST_UNCUT", 2**8)
    found = solved(graph, "dp=2,tp=4")
    monkeypatch.setattr(lagrangian.LagrangianSearch, "refine", lambda _: None)
    alone = solved(graph, "dp=2,tp=4")
    assert found.bound_seconds > alone.bound_seconds
    assert found.bound_seconds <= usual.costs.step_seconds
    assert found.bound_seconds >= 0.999 * usual.bound_seconds
    assert found.costs.step_seconds <= 1.001 * usual.costs.step_seconds


@pytest.mark.parametrize("mesh", ["pp=2,dp=2,cp=2,tp=2", "dp=2,pp=2,cp=2,tp=2"])
def test_stages_beside_three_axes(mesh: str) -> None:
    """Joined axes lie side by side on the mesh of the stages too."""
    model, inputs = gpt(layers=2, d_model=32, heads=4, vocab=64, seq=16, batch=16)
    layout = "micro 4; pipeline pp 1f1b; * -> ?"
    plan = autopar.plan(model, mesh, inputs, layout=layout, cluster="h100", time_limit=4, cache=False)
    assert plan.decided.assignment.pipelining is not None
    assert plan.bound_seconds <= plan.step_seconds


def test_no_bound_of_four_axes() -> None:
    """Its tables would be too large; the bound is the time of the products."""
    graph = autopar.trace(*gpt(layers=2, d_model=96, heads=4, vocab=256, seq=64, batch=16))
    assert solved(graph, "pod=2,dp=2,cp=2,tp=2").bound_by == "peak rate of the devices"


def solved(graph: NamedGraph, mesh: str) -> SolvedPlan:
    made = Mesh(mesh)
    options = TrainingOptions(links=made.links)
    return solve_plan(graph, made.whole, load_cluster("h100"), options=options, memory_bytes=1e15, time_limit=60)
