"""Values of several ops: the bound counts a reshard that they share once, and so holds for every plan."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar.cost.evaluate import evaluate
from autopar.cost.hardware.cluster import load_cluster
from autopar.ir.graph import NamedGraph
from autopar.mesh import SubMesh
from autopar.sharding.bound_layout import BoundLayout
from autopar.sharding.layout.language import Layout
from autopar.sharding.options import TrainingOptions
from autopar.solver.integer.formulate import formulate
from autopar.solver.integer.solve_formulated import solve_formulated
from autopar.solver.model.build import build, plan_of
from autopar.solver.model.cost_tables import weigh
from autopar.solver.model.model import Model
from autopar.solver.model.objective import MOMENTS, Hinges, Sum
from autopar.solver.model.shared_reshards import reshard_parts
from autopar.solver.search.count_once import count_once
from autopar.solver.search.lagrangian import LagrangianSearch
from autopar.solver.search.reshard_shares import ReshardShares
from autopar.solver.setting import PlanningProblem
from tests.plans.test_ring import Attention
from tests.solver.oracle import best_of_all, whole_problem
from tests.solver.random_problems import Drawn, drawn
from tests.solver.test_optimal import MOST_PRICED, priced

H100 = load_cluster("h100")
MOST_STATES = 2**17
WRONG = 1
"""A program with a problem for which the bound of the model is above the best."""


class FanOut(nn.Module):
    """A value that some ops take: products, products with one parameter, ops with another user, a residual."""

    def __init__(self, uses: Sequence[str], width: int, normed: bool, end: str) -> None:
        super().__init__()
        self.uses, self.end = uses, end
        self.scale = nn.Parameter(torch.empty(width, device="meta")) if normed else None
        count = 1 if "tied" in uses else len(uses)
        self.weights = nn.ParameterList(torch.empty(width, width, device="meta") for _ in range(count))

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        h = x.tanh() if self.scale is None else functional.rms_norm(x, x.shape[-1:], self.scale)
        found = x if "residual" in self.uses else None
        for i, use in enumerate(self.uses):
            weight = self.weights[i % len(self.weights)]
            y = {"product": lambda w: h @ w, "tied": lambda w: h @ w, "turned": lambda w: h @ w.T}.get(
                use, lambda w: h * w[0]
            )(weight)
            found = y if found is None else found * y
        assert found is not None, "there are uses"
        if self.end == "both":
            return found.square().sum(), h
        return found.square().sum() if self.end == "square" else found


@cache
def fan_out(seed: int) -> NamedGraph:
    draw = random.Random(seed)
    count = draw.randint(3, 5)
    uses = [draw.choice(("product", "product", "scaled", "turned", "residual")) for _ in range(count)]
    if draw.random() < 0.3:
        uses[0] = "tied"
    model = FanOut(uses, draw.choice((32, 64, 96)), draw.random() < 0.5, draw.choice(("square", "as it is", "both")))
    return autopar.trace(model, (torch.empty(draw.choice((16, 128, 1024)), model.weights[0].shape[0], device="meta"),))


def lagrangian(model: Model) -> LagrangianSearch:
    """Return the search of a model without a limit, with its bound."""
    setting = model.setting

    def report(chosen: Sequence[int]) -> tuple[float, float]:
        costs = setting.costs(plan_of(model, chosen))
        return costs.step_seconds, costs.limited_bytes / 2**30

    search = LagrangianSearch(model, report, np.inf)
    search.run()
    count_once(search)
    return search


def problems(seed: int, axes: Mapping[str, int], count: int) -> list[Drawn]:
    draw, graph, found = random.Random(seed), fan_out(seed), list[Drawn]()
    for lines in range(2, 40):
        problem = drawn(graph, axes, draw, lines)
        try:
            model = build(problem.setting, problem.bound_layout, regather=True)
        except autopar.AutoparError:  # the layout asks for what cannot be had
            continue
        sizes = [float(len(variable.states)) for variable in model.variables]
        if np.prod(sizes) * 3 ** len(graph.ops_of_layers) <= MOST_STATES:
            found.append(problem)
        if len(found) == count:
            break
    return found


def best_and_search(problem: Drawn) -> tuple[float | None, LagrangianSearch]:
    """The seconds of the best of all assignments, None where too many could be it; a search of the problem."""
    search = lagrangian(build(problem.setting, problem.bound_layout))
    oracle = whole_problem(problem.setting, problem.bound_layout)
    return best_of_all(oracle, np.inf, priced(oracle), search.best, MOST_PRICED), search


def test_the_bound_is_below_the_best_where_that_of_the_model_is_not() -> None:
    (problem, *_) = problems(WRONG, {"a": 2}, 1)
    best, search = best_and_search(problem)
    assert best is not None
    assert search.bound <= best * (1 + 1e-9) < search.model_bound


@pytest.mark.slow
@pytest.mark.parametrize("block", range(3))
def test_the_bound_is_below_the_best_of_all_assignments(block: int) -> None:
    """All assignments are listed; those that could be better than what is found are priced."""
    wrong = decided = 0
    for seed in range(block, 60, 3):
        for problem in problems(seed, {"a": 2 if seed % 4 else 8}, 3):
            best, search = best_and_search(problem)
            if best is not None:
                assert search.bound <= best * (1 + 1e-9), seed
                decided += 1
                wrong += search.model_bound > best * (1 + 1e-9)
    assert decided > 2
    assert wrong, "without shares some bounds are above the best"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_the_best_is_found(seed: int) -> None:
    """A small problem is enumerated, where each reshard counts once as well."""
    for problem in problems(seed, {"a": 2}, 1):
        oracle = whole_problem(problem.setting, problem.bound_layout)
        solved = problem.solved()
        best = best_of_all(oracle, np.inf, priced(oracle), solved.costs.step_seconds, MOST_PRICED)
        if best is not None:
            assert best == pytest.approx(solved.costs.step_seconds, rel=1e-9)
            assert solved.bound_seconds <= best * (1 + 1e-9)


# -- sums of gradients -------------------------------------------------------------------------------------------------


def with_memory(problem: Drawn, slower: float) -> Drawn:
    """The problem on devices whose memory is slower than that of an H100."""
    device = replace(H100.device, stream_bytes_per_second=H100.device.stream / slower)
    return replace(problem, cluster=replace(H100, device=device))


def seconds_and_model(problem: Drawn, chosen: Sequence[int]) -> tuple[float, float]:
    """The seconds of an assignment by `evaluate` and by the model, in which shared reshards count once."""
    model = build(problem.setting, problem.bound_layout)
    sums = model.sums(chosen) - ReshardShares(model).counted_again(chosen)
    costs = evaluate(problem.graph, plan_of(model, chosen), problem.cluster)
    return costs.step_seconds, Hinges.of(problem.setting).seconds(sums)


def test_gradients_are_added_as_ops_take_a_value() -> None:
    """Where sums of gradients take nearly all of the time, an assignment takes as long in the model as without them."""
    equal = shared = 0
    for seed in (1, 21, 31, 36):
        draw = random.Random(seed)
        for problem in problems(seed, {"a": 2 if seed % 2 else 8}, 2):
            fast, slow = (with_memory(problem, slower) for slower in (1e-3, 1e5))
            model = build(problem.setting, problem.bound_layout)
            for _ in range(12):
                chosen = [draw.randrange(len(variable.states)) for variable in model.variables]
                (real, found), (slow_real, slow_found) = (seconds_and_model(one, chosen) for one in (fast, slow))
                if found == pytest.approx(real, rel=1e-9):
                    assert slow_found == pytest.approx(slow_real, rel=1e-9)
                    equal += 1
                    shared += ReshardShares(model).counted_again(chosen)[Sum.DEVICE] != 0
    assert equal > 20
    assert shared > 10


@pytest.mark.parametrize("seed", [1, 36])
def test_the_bound_holds_where_memory_is_slower_than_links(seed: int) -> None:
    """Two gradients are then added as the value is kept, if that is smaller: several ops reshard it each."""
    problem = with_memory(problems(seed, {"a": 2 if seed % 2 else 8}, 1)[0], 1e5)
    best, search = best_and_search(problem)
    solved = solve_formulated(formulate(search.model), "highs", "highs", gap=1e-9)
    optimum = solved.objective * formulate(search.model).unit_seconds
    assert best is not None
    assert search.bound <= optimum * (1 + 1e-9)
    assert optimum == pytest.approx(best, rel=1e-4)


# -- larger problems ---------------------------------------------------------------------------------------------------


class Normed(nn.Module):
    """A normed input of three products, as of attention, gated, beside a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(width, device="meta"))
        self.weights = nn.ParameterList(torch.empty(width, width, device="meta") for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale
        q, k, v = (h @ weight for weight in self.weights[:3])
        return x + (torch.softmax(q @ k.transpose(-1, -2), -1) @ v) @ self.weights[3]


def descended(model: Model, chosen: list[int], draw: random.Random, most: int) -> float:
    """The least seconds of plans along a descent: one variable takes another state while that is faster."""
    setting, best = model.setting, np.inf
    for _ in range(most):
        place = draw.randrange(len(model.variables))
        other = [*chosen]
        other[place] = draw.randrange(len(model.variables[place].states))
        if model.sums(other)[Sum.FORBIDDEN]:
            continue
        seconds = evaluate(setting.graph, plan_of(model, other), setting.cluster).step_seconds
        if seconds < best:
            best, chosen = seconds, other
    return best


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(8, 8192, 1024), (64, 512, 4096), (1, 32768, 2048)])
@pytest.mark.parametrize("axes", [{"a": 8}, {"a": 4, "b": 8}])
def test_no_plan_near_the_best_is_below_the_bound(sizes: tuple[int, int, int], axes: Mapping[str, int]) -> None:
    """The bound of a linear program, in which each reshard counts once as well, is a second way to it."""
    graph = autopar.trace(Normed(sizes[-1]), (torch.empty(sizes, device="meta"),))
    setting = PlanningProblem.of(graph, SubMesh.of(axes), H100, TrainingOptions())
    model = build(setting, BoundLayout(graph, Layout(()), axes))
    search = lagrangian(model)
    draw = random.Random(0)
    starts = sorted(search.found.values(), key=lambda one: one.seconds)[:3]
    for start in starts:
        assert search.bound <= descended(model, list(start.chosen), draw, 400) * (1 + 1e-9)
    if len(axes) == 1:
        best = solve_formulated(formulate(model), "highs", "highs", gap=1e-9)
        assert search.bound <= best.objective * formulate(model).unit_seconds * (1 + 1e-6)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.down(self.up(x).relu())
        return found


def test_a_value_is_resharded_again_where_a_recompute_takes_it() -> None:
    """In memory it may be as it is smallest; the bound adds the reshard to what both ops of the next layer take."""
    graph = autopar.trace(
        nn.Sequential(*(Residual(64) for _ in range(4))).to("meta"), (torch.empty(512, 64, device="meta"),)
    )
    setting = PlanningProblem.of(graph, SubMesh.of({"a": 2, "b": 2}), H100, TrainingOptions("loss"))
    setting = replace(setting, may_offload=False)
    layout = BoundLayout(graph, Layout(()), setting.axes)
    model = build(setting, layout, regather=True, open_layers=tuple(graph.ops_of_layers))
    hinges = Hinges.of(setting)
    # A GiB is dear, so that the smallest state has the least costs.
    weights = hinges.weights(np.ones(len(hinges.offsets)))[0] + 10.0 * MOMENTS[0]
    kept = np.where(np.arange(len(Sum)) == Sum.KEPT_GIB, weights, 0.0)
    full, checked, shares = setting.modes.index("full"), 0, ReshardShares(model)
    costs, tables = (
        [np.zeros(len(one.states)) for one in model.variables],
        [one.table.weighted(weights) for one in model.factors],
    )
    before = list(tables)
    shares.discount(costs, tables, weights)
    for factor, old, new in zip(model.factors, before, tables, strict=True):
        kinds = [model.variables[node].kind for node in factor.scope]
        if old is new or kinds != ["recompute", "value", "op"]:
            continue
        value = model.variables[factor.scope[1]]
        sizes = sum(weigh(parts, kept) for parts in value.parts)
        tensor, states = graph.tensors[value.name], list(value.states)
        once, twice = (
            reshard_parts(model.cost_tables, tensor, states, states, again, again) for again in (False, True)
        )
        again = weigh(twice, weights) - weigh(once, weights)
        least = (sizes[:, None] + again).min(axis=0)
        less = (old - new)[full]
        # All options of an op take as much less, in states that both ops may take.
        assert (less == less[:, :1]).all()
        assert (less[:, 0] <= sizes - least + 1e-12).all()
        checked += int((sizes - least < sizes - sizes.min() - 1e-9).sum())
    assert checked > 0


@pytest.mark.slow
def test_a_pinned_plan_is_not_below_the_bound() -> None:
    """Keys, values and queries take their input by heads and by rows: one reshard serves all three."""
    with torch.device("meta"):
        model, inputs = Attention().bfloat16(), (torch.empty(1, 131072, 4096, dtype=torch.bfloat16),)
    free, pinned = (
        autopar.plan(model, "cp=8,tp=8", inputs, layout=f"fold seq; {pin}", cluster="h100", cache=False, time_limit=120)
        for pin in ("", "op @/folded_attention[s -> cp, h -> tp]")
    )
    assert free.gap is not None
    assert free.gap < 5e-3
    assert free.step_seconds * (1 - free.gap) <= free.step_seconds <= pinned.step_seconds * (1 + 1e-9)
