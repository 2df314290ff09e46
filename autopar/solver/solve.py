"""`solve_plan`: the best plan that is found for a graph on a mesh, and how far from the best of all it can be."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from autopar.cost.evaluate import Costs
from autopar.cost.hardware.cluster import Cluster
from autopar.ir.graph import NamedGraph
from autopar.ir.invariants import verifying
from autopar.mesh import SubMesh
from autopar.sharding.assignment import StepPlan
from autopar.sharding.bound_layout import BoundLayout
from autopar.sharding.layout.language import Layout
from autopar.sharding.options import TrainingOptions
from autopar.sharding.verify import verify_assignment
from autopar.solver.infeasible.errors import NoFeasiblePlan, OutOfTime
from autopar.solver.infeasible.explain import infeasible_error
from autopar.solver.model.cost_tables import CostTables
from autopar.solver.progress import Progress, relative_gap
from autopar.solver.search.incumbent import Incumbent
from autopar.solver.search.joined_axes import MOST_AXES
from autopar.solver.search.phases import SearchPhases, SearchResult, settle, worthwhile
from autopar.solver.setting import PlanningProblem
from autopar.solver.strategies import plan_under, strategy_plans

__all__ = ["SolvedPlan", "TrainingOptions", "solve_plan"]

SEARCH_SHARE = 0.75
"""Of the time, after which the strategies of experts are priced if the search has not ended."""

LEAST_PRICED = 3
"""Strategies that are priced however little time there is: those of one axis, which take little, and are often good."""


@dataclass(frozen=True)
class SolvedPlan:
    """A plan, what `evaluate` says it costs, and what is proved of all plans."""

    plan: StepPlan
    costs: Costs
    bound_seconds: float
    search_seconds: float
    origin: str
    """Where it comes from: `search`, or the strategy of an expert that nothing was found to beat."""
    variables: int
    states: int

    @property
    def gap(self) -> float:
        """How far the bound is below the step's seconds, as a part of them."""
        return relative_gap(self.costs.step_seconds, self.bound_seconds)


def solve_plan(
    graph: NamedGraph,
    axes: SubMesh,
    cluster: Cluster,
    *,
    layout: Layout | None = None,
    memory_bytes: float | None = None,
    options: TrainingOptions | None = None,
    time_limit: float = 30.0,
    progress: Callable[[Progress], None] | None = None,
    warm: StepPlan | None = None,
    experts: bool = True,
    beat_seconds: float = math.inf,
) -> SolvedPlan:
    """Decide what of a plan is open: all of it, or what `layout` leaves.

    `memory_bytes` is what the plan may hold on each device; by default what the device has. `warm` is a plan to begin
    from; `experts`: whether the strategies of experts are priced as well, in the time left, or a quarter of it.
    `beat_seconds`: only a faster plan is of use; that there is none is a `NoFeasiblePlan`.
    """
    began = time.monotonic()
    with _uncollected():
        setting = PlanningProblem.of(graph, SubMesh.of(axes), cluster, options or TrainingOptions())
        limit = cluster.device.memory_bytes if memory_bytes is None else memory_bytes
        bound_layout = BoundLayout(graph, layout or Layout(()), axes)
        incumbent = Incumbent(setting, limit, began, progress, bound_layout)
        return _solved(incumbent, time_limit, warm, experts, beat_seconds)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the collector of cycles: a search makes millions of objects, and cycles of next to none of them; looking
    for these took a third of the time for a model of 32 layers."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _solved(
    incumbent: Incumbent, time_limit: float, warm: StepPlan | None, experts: bool, beat_seconds: float
) -> SolvedPlan:
    setting, bound_layout, began, layout = (
        incumbent.setting,
        incumbent.bound_layout,
        incumbent.began,
        incumbent.bound_layout.given,
    )
    if layout.statements:
        plan = plan_under(setting, layout)
        if plan is not None:
            incumbent.offer("layout", plan.with_options(setting.options))
    # A plan that was made for something else may break this layout.
    asked = setting.graph.fingerprint, dict(setting.axes)
    if warm is not None and bound_layout.is_empty and (warm.graph, dict(warm.axes)) == asked:
        incumbent.offer("an earlier plan", warm)
    priced = experts and not layout.statements
    searching = began + time_limit * (SEARCH_SHARE if priced else 1.0)
    work = SearchPhases(
        setting, bound_layout, incumbent, CostTables(setting), searching, searching, until_one_fits=not priced
    )
    ended = _searched(work, beat_seconds)
    if ended.bound >= beat_seconds:
        raise NoFeasiblePlan(f"no plan takes less than {beat_seconds:.3g} s")
    work = replace(work, deadline=began + time_limit, gives_up=math.inf, until_one_fits=True)
    if priced:
        incumbent.tell("search", ended.bound)
        _offer_strategies(incumbent, ended.bound, work.deadline)
        incumbent.tell("experts", ended.bound)
        if incumbent.plan is None and ended.is_cut:
            ended = _searched(work, beat_seconds)
    bound, search = max(ended.bound, incumbent.floor), ended.search
    if search is not None and not ended.is_part:
        search.best, search.deadline = incumbent.seconds, work.deadline
        search.close()
        bound = search.proved if search.is_listed else max(bound, search.proved)
    incumbent.tell("search", bound)
    if incumbent.plan is None or incumbent.costs is None:
        raise infeasible_error(work)
    if verifying():
        verify_assignment(incumbent.setting.graph, incumbent.plan.assignment)
    variables = () if search is None else search.model.variables
    return SolvedPlan(
        incumbent.plan,
        incumbent.costs,
        min(bound, incumbent.seconds),
        time.monotonic() - began,
        incumbent.origin,
        len(variables),
        sum(len(variable.states) for variable in variables),
    )


def _searched(work: SearchPhases, beat_seconds: float) -> SearchResult:
    """A mesh of many axes with joined axes first. Of its choices not all are searched, so what is proved is not of all
    plans."""
    if len(work.setting.used) <= MOST_AXES:
        return settle(work, beat_seconds)
    try:
        work = replace(work, ways=worthwhile(work))
    except OutOfTime:
        return SearchResult(None, 0.0, is_cut=True)
    return replace(settle(work), bound=0.0, is_part=True)


def _offer_strategies(incumbent: Incumbent, bound: float, deadline: float) -> None:
    """The strategies of experts, as long as one of them could be better and there is time, or nothing that fits."""
    priced = 0

    def is_late() -> bool:
        if relative_gap(incumbent.seconds, bound) == 0.0:
            return True
        return incumbent.plan is not None and priced >= LEAST_PRICED and time.monotonic() > deadline

    for name, plan in strategy_plans(incumbent.setting, is_late):
        incumbent.offer(name, plan)
        priced += 1
