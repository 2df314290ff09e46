"""Layers computed again, decided with all else: the model with a mode for each layer is the models of all modes."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.cost.evaluate import evaluate
from autopar.cost.hardware.cluster import load_cluster
from autopar.ir.graph import NamedGraph
from autopar.mesh import SubMesh
from autopar.sharding.bound_layout import BoundLayout
from autopar.sharding.layout.language import Layout
from autopar.sharding.options import TrainingOptions
from autopar.solver.infeasible import NoFeasiblePlan
from autopar.solver.model.build import build, plan_of
from autopar.solver.model.model import Model
from autopar.solver.model.objective import MEMORY, MOMENTS, Hinges, Sum
from autopar.solver.search.elimination import Elimination
from autopar.solver.search.splice import Splices, places_of
from autopar.solver.setting import PlanningProblem
from autopar.solver.solve import solve_plan
from examples.gpt import gpt

AXES = {"dp": 2, "tp": 2}
CLUSTER = load_cluster("a100-40")
SPENT = [key for key in Sum if key not in MEMORY]


@pytest.fixture(scope="module")
def graph() -> NamedGraph:
    model, inputs = gpt(batch=4, seq=8, d_model=16, heads=2, vocab=16, layers=2)
    return autopar.trace(model, inputs)


@pytest.fixture(scope="module")
def setting(graph: NamedGraph) -> PlanningProblem:
    return PlanningProblem.of(graph, SubMesh.of(AXES), CLUSTER, TrainingOptions())


@pytest.fixture(scope="module")
def model(graph: NamedGraph, setting: PlanningProblem) -> Model:
    return build(setting, BoundLayout(graph, Layout(()), AXES), regather=True, open_layers=tuple(graph.ops_of_layers))


def drawn(model: Model, draw: random.Random) -> list[int]:
    return [draw.randrange(len(variable.states)) for variable in model.variables]


def test_two_ops_save_no_less_than_nothing(model: Model) -> None:
    """A value of one user of its layer counts in the table of both ops, which alone says what is saved."""
    weights = np.zeros(len(Sum))
    weights[Sum.KEPT_GIB] = 1.0
    found = []
    for factor in model.factors:
        pair = [model.variables[node] for node in factor.scope[-2:]]
        if {one.kind for one in pair} == {"op"} and model.setting.shares_layer(*(one.name for one in pair)):
            found.append(factor.table.weighted(weights))
    assert len(found) > 10
    assert min(table.min() for table in found) == 0.0
    assert max(table.max() for table in found) > 0.0


@pytest.mark.slow
def test_a_mode_of_a_layer_takes_what_it_takes_where_it_is_settled(
    graph: NamedGraph, setting: PlanningProblem, model: Model
) -> None:
    draw = random.Random(0)
    layers = tuple(graph.ops_of_layers)
    own = [model.place["recompute", path] for path in layers]
    for modes in product(setting.modes, repeat=len(layers)):
        recompute = dict(zip(layers, modes, strict=True))
        settled = build(setting, BoundLayout(graph, Layout(()), AXES), regather=True, recompute=recompute)
        for _ in range(3):
            chosen = drawn(model, draw)
            for place, mode in zip(own, modes, strict=True):
                chosen[place] = setting.modes.index(mode)
            rest = [chosen[model.place[variable.kind, variable.name]] for variable in settled.variables]
            np.testing.assert_allclose(model.sums(chosen)[SPENT], settled.sums(rest)[SPENT], rtol=1e-12, atol=1e-18)
            plan, other = plan_of(model, chosen), plan_of(settled, rest)
            assert evaluate(graph, plan, CLUSTER) == evaluate(graph, other, CLUSTER)


def test_mixtures_are_what_the_model_says_of_them(model: Model, setting: PlanningProblem) -> None:
    draw = random.Random(1)
    first, then = drawn(model, draw), drawn(model, draw)
    found = Splices.of(model, Hinges.of(setting), places_of(model), first, then)
    assert found.at(0) == then
    assert found.at(len(found.sums) - 1) == first
    for place in (*range(0, len(found.sums), 7), len(found.sums) - 1):
        sums = model.sums(found.at(place))
        np.testing.assert_allclose(found.sums[place], sums, rtol=1e-9, atol=1e-12)
        assert found.seconds[place] == pytest.approx(Hinges.of(setting).seconds(sums), rel=1e-9)


def test_elimination_with_modes_is_a_bound_that_candidates_come_close_to(model: Model) -> None:
    draw = random.Random(2)
    elimination = Elimination.of(model)
    for price in (0.0, 1e-3, 1.0):
        weights = np.ones(len(Sum))
        weights[list(MEMORY)] = price
        bound = elimination.least(weights).value
        found = float(weights @ model.sums(elimination.candidate(weights)))
        assert bound <= found * (1 + 1e-9)
        assert found <= min(float(weights @ model.sums(drawn(model, draw))) for _ in range(50))


@pytest.mark.slow
def test_less_memory_is_no_faster_and_computes_layers_again(graph: NamedGraph) -> None:
    free = solve_plan(graph, {"dp": 2}, CLUSTER, time_limit=3600)
    seconds, most = [free.costs.step_seconds], free.costs.memory.peak_bytes
    modes: set[str] = set()
    for share in (0.85, 0.7, 0.55, 0.4):
        try:
            found = solve_plan(graph, {"dp": 2}, CLUSTER, memory_bytes=share * most, time_limit=3600)
        except NoFeasiblePlan:
            break
        assert found.costs.memory.peak_bytes <= share * most
        assert found.bound_seconds <= found.costs.step_seconds
        seconds.append(found.costs.step_seconds)
        modes |= set(found.plan.recompute.values())
    assert len(seconds) > 2
    assert seconds == sorted(seconds)
    assert modes - {"none"}


def test_a_mesh_that_cannot_win_is_given_up(graph: NamedGraph) -> None:
    best = solve_plan(graph, {"dp": 2}, CLUSTER, strategies=False, time_limit=3600)
    assert best.bound_seconds > 0
    with pytest.raises(NoFeasiblePlan, match="no plan takes less than"):
        solve_plan(graph, {"dp": 2}, CLUSTER, strategies=False, beat_seconds=0.5 * best.bound_seconds, time_limit=3600)
    same = solve_plan(
        graph, {"dp": 2}, CLUSTER, strategies=False, beat_seconds=2 * best.costs.step_seconds, time_limit=3600
    )
    assert same.costs == best.costs


def test_a_recomputed_layer_is_in_memory_when_its_backward_begins() -> None:
    graph = autopar.trace(*gpt(layers=4, d_model=512, heads=8, vocab=1000, seq=512, batch=32, device="meta"))
    setting = PlanningProblem.of(graph, SubMesh.of({"dp": 4, "tp": 2}), CLUSTER, TrainingOptions("loss"))
    model = build(
        setting, BoundLayout(graph, Layout(()), setting.axes), regather=True, open_layers=tuple(graph.ops_of_layers)
    )
    elimination, shares = Elimination.of(model), list[tuple[float, float]]()
    for price in (1e-3, 1e-1, 1e2):
        weights = Hinges.of(setting).base + price * MOMENTS[0]
        for mode in ("selective", "full"):
            chosen = elimination.candidate(weights)
            for path in graph.ops_of_layers:
                chosen[model.place["recompute", path]] = setting.modes.index(mode)
            estimates = MOMENTS @ model.sums(chosen)
            peak = evaluate(graph, plan_of(model, chosen), CLUSTER).memory.peak_bytes / 2**30
            assert estimates.max() <= peak * (1 + 1e-6)
            shares.append((estimates[:3].max() / peak, estimates.max() / peak))
    # Other moments tell two thirds of the memory at most where layers are recomputed in full.
    assert all(found > 0.7 > without for without, found in shares[1::2])


def test_what_enters_a_recomputed_layer_is_in_memory() -> None:
    """No op of a Llama saves the input of a layer, which its norm reads in another dtype."""
    sizes = {"vocab_size": 4000, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    with torch.device("meta"):
        llama, ids = LlamaForCausalLM(config).bfloat16(), torch.zeros(16, 512, dtype=torch.int64)
    graph = autopar.trace(llama, {"input_ids": ids, "labels": ids})
    setting = PlanningProblem.of(graph, SubMesh.of({"dp": 8}), CLUSTER, TrainingOptions("loss"))
    model = build(
        setting, BoundLayout(graph, Layout(()), setting.axes), regather=True, open_layers=tuple(graph.ops_of_layers)
    )
    chosen = Elimination.of(model).candidate(Hinges.of(setting).base + 1e-2 * MOMENTS[0])
    for modes in (["full"] * 6, ["full", "none"] * 3):
        for path, mode in zip(graph.ops_of_layers, modes, strict=True):
            chosen[model.place["recompute", path]] = setting.modes.index(mode)
        memory = evaluate(graph, plan_of(model, chosen), CLUSTER).memory
        assert "cross_entropy" in memory.peak_at
        estimate = (MOMENTS @ model.sums(chosen)).max() * 2**30
        input_bytes = 2 * 512 * 256 * 2
        assert estimate == pytest.approx(memory.peak_bytes, abs=input_bytes / 2)
