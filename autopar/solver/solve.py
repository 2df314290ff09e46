"""`solve_plan`: search the best plan of a graph on a mesh, with a lower bound on every plan."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from autopar.cost.costs import Costs
from autopar.cost.hardware.cluster import Cluster
from autopar.ir.graph import NamedGraph
from autopar.ir.invariants import verifying
from autopar.mesh import SubMesh
from autopar.sharding.assignment import StepPlan
from autopar.sharding.bound_layout import BoundLayout
from autopar.sharding.layout.language import Layout
from autopar.sharding.options import TrainingOptions
from autopar.sharding.pipelining import check_pipeline, without_stages
from autopar.sharding.shares import with_shares
from autopar.sharding.time_slice import slice_in_time
from autopar.sharding.verify import verify_assignment
from autopar.solver import Progress, relative_gap
from autopar.solver.explain_infeasible import infeasible_error
from autopar.solver.infeasible import NoFeasiblePlan, OutOfTime
from autopar.solver.integer.choice import SEARCH, SolverChoice
from autopar.solver.integer.formulation import FormulatedModel
from autopar.solver.integer.search_by_program import (
    formulate_request,
    proved_by_relaxation,
    solved_by_program,
    unsolved_error,
)
from autopar.solver.model.cost_tables import CostTables
from autopar.solver.published_strategies import StrategyOffers, plan_under
from autopar.solver.search.phases import (
    Incumbent,
    SearchPhases,
    SearchResult,
    is_searched_whole,
    promising_choices,
    search_least_memory,
    settle,
)
from autopar.solver.search.prove_small import prove_small
from autopar.solver.search.whole_mesh import MOST_PROVED_AXES, prove_whole
from autopar.solver.setting import MicroBatchedCall, PlanningProblem
from autopar.solver.stages import settle_stages, with_call

__all__ = ["SolvedPlan", "TrainingOptions", "request_program", "solve_plan", "uncollected"]


# Fraction of the time limit after which published strategies are priced even if the search has not ended.
SEARCH_SHARE = 0.75


@dataclass(frozen=True)
class SolvedPlan:
    """Plan with its cost by `evaluate` and the lower bound on all plans."""

    plan: StepPlan
    costs: Costs
    bound_seconds: float
    search_seconds: float
    # `search`, or the name of the published strategy that no other plan beat.
    origin: str
    variables: int
    states: int
    # `search`, or the program that proved the bound.
    bound_by: str = "search"

    @property
    def gap(self) -> float:
        """Distance from the bound to the step time, as a fraction of the step time."""
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
    warm: Mapping[str, StepPlan] | None = None,
    strategies: bool = True,
    beat_seconds: float = math.inf,
    solver: SolverChoice = SEARCH,
    until_one_fits: bool = True,
) -> SolvedPlan:
    """Search the open decisions of a plan: all of them, or those that `layout` leaves.

    `memory_bytes` limits each device; the default is its capacity. `warm` has plans to begin from, by origin. With
    `strategies`, published strategies are priced too, in the time left or a quarter of it. Raise `NoFeasiblePlan` if no
    plan is faster than `beat_seconds`. `solver` has the plan found or proved by an integer or a linear program. With
    `until_one_fits` the time limit is passed until a plan fits, unless the estimates of memory show that none can.
    """
    began = time.monotonic()
    with uncollected():
        micro = None if layout is None else layout.micro_batches
        graph, axes = with_shares(graph, layout or Layout(()), SubMesh.of(axes), 1 if micro is None else micro.count)
        incumbent = _incumbent(graph, axes, cluster, layout, memory_bytes, options, began, progress)
        found = _solved(incumbent, time_limit, warm or {}, strategies, beat_seconds, solver, until_one_fits)
        settle_stages(incumbent, layout or Layout(()), axes)
        # The search has the shards of one kind of ranks; the plan is for all.
        plan = (incumbent.plan or found.plan).seen({})
        return replace(found, plan=plan, costs=incumbent.costs or found.costs)


def request_program(
    graph: NamedGraph,
    axes: SubMesh,
    cluster: Cluster,
    *,
    layout: Layout | None = None,
    memory_bytes: float | None = None,
    options: TrainingOptions | None = None,
) -> FormulatedModel:
    """Return the integer program of a request, as `solve_plan` would solve it in one piece."""
    with uncollected():
        micro = None if layout is None else layout.micro_batches
        graph, axes = with_shares(graph, layout or Layout(()), SubMesh.of(axes), 1 if micro is None else micro.count)
        incumbent = _incumbent(graph, axes, cluster, layout, memory_bytes, options, time.monotonic(), None)
        setting = incumbent.setting
        work = SearchPhases(setting, incumbent.bound_layout, incumbent, CostTables(setting), math.inf)
        return formulate_request(work)


def _incumbent(
    graph: NamedGraph,
    axes: SubMesh,
    cluster: Cluster,
    layout: Layout | None,
    memory_bytes: float | None,
    options: TrainingOptions | None,
    began: float,
    progress: Callable[[Progress], None] | None,
) -> Incumbent:
    """Return the incumbent of a request: the problem, its limit, its layout, and no plan yet."""
    setting = _problem(graph, axes, cluster, options or TrainingOptions(), layout or Layout(()))
    limit = cluster.device.memory_bytes if memory_bytes is None else memory_bytes
    said = Layout(()) if layout is None else layout.without_time()
    # The search splits by axes of several ranks alone.
    said = said.on_axes({axis: () for axis, size in setting.axes.items() if size == 1})
    return Incumbent(setting, limit, began, progress, BoundLayout(setting.graph, said, setting.axes))


def _problem(
    graph: NamedGraph, axes: SubMesh, cluster: Cluster, options: TrainingOptions, layout: Layout
) -> PlanningProblem:
    """Return the problem of one call, or of one of its micro-batches on the axes that split tensors."""
    micro = layout.micro_batches
    check_pipeline(layout, axes)
    if micro is None or micro.parts == 1:
        return PlanningProblem.of(graph, axes, cluster, options)
    options = replace(options, micro_batches=micro.count)
    call = MicroBatchedCall(graph, micro)
    found = PlanningProblem.of(slice_in_time(graph, micro), without_stages(layout, axes), cluster, options, call)
    if layout.pipeline is None:
        return found
    return PlanningProblem.of(found.graph, found.axes, cluster, options, with_call(found, layout, axes))


@contextmanager
def uncollected() -> Iterator[None]:
    """Run without the collector of cycles.

    A search makes millions of objects and next to no cycles. Looking for cycles took a third of the time on 32 layers.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _solved(
    incumbent: Incumbent,
    time_limit: float,
    warm: Mapping[str, StepPlan],
    strategies: bool,
    beat_seconds: float,
    solver: SolverChoice,
    until_one_fits: bool,
) -> SolvedPlan:
    setting, bound_layout, began = incumbent.setting, incumbent.bound_layout, incumbent.began
    _offer_known(incumbent, warm)
    priced = strategies and not bound_layout.given.statements
    searching = began + time_limit * (SEARCH_SHARE if priced else 1.0)
    work = SearchPhases(
        setting,
        bound_layout,
        incumbent,
        CostTables(setting),
        searching,
        searching,
        until_one_fits=until_one_fits and not priced,
    )
    incumbent.cannot_fit = work.stored_bytes > incumbent.limit
    ended = solved_by_program(work, solver) if solver.method == "ilp" else _searched(work, beat_seconds)
    if solver.method == "lp":
        ended = proved_by_relaxation(replace(work, gives_up=math.inf, deadline=began + time_limit), ended, solver)
    if ended.bound >= beat_seconds:
        raise NoFeasiblePlan(f"no plan takes less than {beat_seconds:.3g} s")
    ends = began + time_limit
    work = replace(work, deadline=ends, gives_up=math.inf if until_one_fits else ends, until_one_fits=until_one_fits)
    if priced:
        incumbent.tell("search", ended.bound)
        ended = _raced(work, ended, beat_seconds, until_one_fits and solver.method != "ilp")
    bound, search = max(ended.bound, incumbent.floor), ended.search
    bound_by = ended.bound_by if bound == ended.bound else "peak rate of the devices"
    if search is not None and not ended.is_part:
        search.best, search.deadline = incumbent.seconds, work.deadline
        prove_small(search)
        bound_by = "search" if search.is_enumerated or search.proved > bound else bound_by
        bound = search.proved if search.is_enumerated else max(bound, search.proved)
    incumbent.tell("search", bound)
    if incumbent.plan is None or incumbent.costs is None:
        is_unsolved = solver.method == "ilp" and ended.is_cut
        raise unsolved_error(work, solver, ended) if is_unsolved else infeasible_error(work)
    return _priced_plan(incumbent, incumbent.plan, incumbent.costs, ended, (bound, bound_by))


def _priced_plan(
    incumbent: Incumbent, plan: StepPlan, costs: Costs, ended: SearchResult, proved: tuple[float, str]
) -> SolvedPlan:
    if verifying():
        verify_assignment(incumbent.setting.graph, plan.assignment)
    model = ended.model if ended.search is None else ended.search.model
    variables = () if model is None else model.variables
    bound, bound_by = proved
    return SolvedPlan(
        plan,
        costs,
        min(bound, incumbent.seconds),
        time.monotonic() - incumbent.began,
        incumbent.origin,
        len(variables),
        sum(len(variable.states) for variable in variables),
        bound_by,
    )


def _offer_known(incumbent: Incumbent, warm: Mapping[str, StepPlan]) -> None:
    """Offer the plan that the layout gives without a search, and known plans of the same problem."""
    setting, layout = incumbent.setting, incumbent.bound_layout.given
    if layout.statements:
        plan = plan_under(setting, layout)
        if plan is not None:
            incumbent.offer("layout", plan.with_options(setting.options))
    asked = setting.whole_graph.fingerprint, dict(setting.axes), None if setting.call is None else setting.call.micro
    for origin, plan in warm.items():
        # A plan made for another layout may break this one.
        if incumbent.bound_layout.is_empty and (plan.graph, dict(plan.axes), plan.micro) == asked:
            incumbent.offer(origin, plan.with_options(setting.options))


def _searched(work: SearchPhases, beat_seconds: float) -> SearchResult:
    """Search the mesh; of a mesh of many axes, search joined axes first, unless the graph has few choices.

    The second search covers part of the choices, so its bound does not hold for all plans. On three axes another bound
    does.
    """
    if is_searched_whole(work):
        return settle(work, beat_seconds)
    try:
        work = replace(work, ways=promising_choices(work))
    except OutOfTime:
        return SearchResult(None, 0.0, is_cut=True)
    ended = settle(work)
    bound = _whole_bound(work, ended, beat_seconds)
    return replace(ended, bound=bound, is_part=True)


def _whole_bound(work: SearchPhases, ended: SearchResult, beat_seconds: float) -> float:
    """Return a bound on all plans of a mesh that no search of one model proves; zero where it has too many axes."""
    is_best = ended.search is not None and work.incumbent.seconds < beat_seconds
    if ended.search is None or not is_best or len(work.setting.used) > MOST_PROVED_AXES:
        return 0.0
    return prove_whole(work, ended.search.hinge_multipliers())


def _raced(work: SearchPhases, ended: SearchResult, beat_seconds: float, searches_on: bool) -> SearchResult:
    """Offer published strategies; if the search was cut and none of the first fits, search on in the second half.

    After such a search strategies keep the limit on time: where the plans of least memory do not fit, they rarely do.
    """
    incumbent, now, until_one_fits = work.incumbent, time.monotonic(), work.until_one_fits
    offers = StrategyOffers(incumbent)
    if searches_on and ended.is_cut and now < work.deadline:
        offers.run(ended.bound, (now + work.deadline) / 2, until_one_fits=False)
        if incumbent.is_open:
            ended, until_one_fits, searches_on = _searched_on(work, ended, beat_seconds), False, False
    offers.run(ended.bound, work.deadline, until_one_fits)
    incumbent.tell("strategies", ended.bound)
    if searches_on and ended.is_cut and incumbent.is_open:
        ended = _searched_on(work, ended, beat_seconds)
    return ended


def _searched_on(work: SearchPhases, ended: SearchResult, beat_seconds: float) -> SearchResult:
    """Search on while no plan fits: the least memory first; all else, once a plan fits or while time is left."""
    if is_searched_whole(work):
        search_least_memory(work)
        if work.incumbent.plan is None and time.monotonic() > work.deadline:
            return ended
    return _searched(work, beat_seconds)
