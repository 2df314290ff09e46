"""`solve_plan`: search the best plan of a graph on a mesh, with a lower bound on every plan."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product

from autopar.cost.costs import Costs
from autopar.cost.hardware.cluster import Cluster
from autopar.errors import LayoutError
from autopar.ir.graph import NamedGraph
from autopar.ir.invariants import verifying
from autopar.lowering.collectives.process_groups import GroupsOfMicroBatch
from autopar.lowering.emit import emit
from autopar.lowering.passes.pipeline_parts import check_loops
from autopar.mesh import SubMesh
from autopar.sharding.assignment import StepPlan
from autopar.sharding.bound_layout import BoundLayout
from autopar.sharding.layout.language import Layout, applies_to, axes_of, load_strategy, roles_of, strategy_names
from autopar.sharding.layout.syntax import MicroBatches
from autopar.sharding.options import TrainingOptions
from autopar.sharding.pipelining import check_pipeline, without_stages
from autopar.sharding.propagation import PropagationCache
from autopar.sharding.schedules import Schedule
from autopar.sharding.shares import with_shares
from autopar.sharding.time_slice import propagate_plan, slice_in_time, time_assignment
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
from autopar.solver.less_memory import offer_with_less_memory
from autopar.solver.model.cost_tables import CostTables
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

__all__ = [
    "WHOLE",
    "SolvedPlan",
    "TrainingOptions",
    "axis_assignments",
    "check_in_time",
    "request_program",
    "solve_plan",
    "splits_nothing",
    "strategy_plans",
]


# Fraction of the time limit after which published strategies are priced even if the search has not ended.
SEARCH_SHARE = 0.75

# Published strategies are not priced where no plan can be better by more than this share: a prediction errs by more.
CLOSE = 1e-3

# Strategies that are priced in any case: those of one axis come first, are quick, and are often good.
LEAST_PRICED = 3
# Strategies that take too much memory as they are, and are priced with less.
MOST_SHRUNK = 8


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
        plan = incumbent.plan or found.plan
        # The search prices the ranks of one kind; the plan is for all.
        assignment = replace(plan.assignment, axes=plan.axes.seen({}))
        return replace(found, plan=replace(plan, assignment=assignment), costs=incumbent.costs or found.costs)


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
    if micro is None or micro.count == 1:
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
        _offer_strategies(incumbent, ended.bound, work.deadline, until_one_fits)
        incumbent.tell("strategies", ended.bound)
        is_open = until_one_fits and not incumbent.cannot_fit
        if incumbent.plan is None and ended.is_cut and is_open and solver.method != "ilp":
            ended = _searched_on(work, ended, beat_seconds)
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
    does. A model that is too wide for elimination by options is searched by classes as well.
    """
    if is_searched_whole(work):
        ended = settle(work, beat_seconds)
        # The bound by classes knows no limit on memory, so that of the search is higher under one.
        is_wide = ended.search is not None and ended.search.elimination.hub is not None and not ended.search.is_limited
        return replace(ended, bound=max(ended.bound, _whole_bound(work, ended, beat_seconds))) if is_wide else ended
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


def _searched_on(work: SearchPhases, ended: SearchResult, beat_seconds: float) -> SearchResult:
    """Search on while no plan fits: the least memory first; all else, once a plan fits or while time is left."""
    if is_searched_whole(work):
        search_least_memory(work)
        if work.incumbent.plan is None and time.monotonic() > work.deadline:
            return ended
    return _searched(work, beat_seconds)


def _offer_strategies(incumbent: Incumbent, bound: float, deadline: float, until_one_fits: bool) -> None:
    """Price published strategies while one could be better and time is left, or while nothing fits."""
    priced = 0
    # Where memory decides, the bound is as sure as the estimates of memory.
    close = CLOSE if incumbent.is_free else 0.0

    def is_late() -> bool:
        if relative_gap(incumbent.seconds, bound) <= close:
            return True
        if not until_one_fits or incumbent.cannot_fit:
            return time.monotonic() > deadline
        return incumbent.plan is not None and priced >= LEAST_PRICED and time.monotonic() > deadline

    too_large: list[tuple[float, str, StepPlan, Costs]] = []
    for name, plan in strategy_plans(incumbent.setting, is_late):
        if incumbent.may_improve(plan):
            costs = incumbent.offer(name, plan)
            if costs.limited_bytes > incumbent.limit:
                too_large.append((costs.step_seconds, name, plan, costs))
        priced += 1
    for seconds, name, plan, costs in sorted(too_large, key=lambda one: one[0])[:MOST_SHRUNK]:
        if seconds < incumbent.seconds and not is_late():
            offer_with_less_memory(incumbent, name, plan, costs)


# -- plans of published strategies -------------------------------------------------------------------------------------


# Name of a plan in which every device does everything, whichever strategy produced it.
WHOLE = "a layout that splits nothing"


def splits_nothing(plan: StepPlan) -> bool:
    """Return whether every device stores and computes everything."""
    assignment = plan.assignment
    held = any(any(layout.splits) for layout in assignment.stored.values())
    splits = held or any(op.choice.splits for op in assignment.ops.values())
    return assignment.pipelining is None and not splits


def strategy_plans(
    setting: PlanningProblem, is_late: Callable[[], bool] = lambda: False
) -> Iterator[tuple[str, StepPlan]]:
    """Yield the plan of every strategy that applies, named with its axes; equal plans once.

    Strategies with few axes come first, as the others have many assignments. `is_late` is called before each
    assignment and ends the walk: finding that one does not apply takes as long as finding that it does.
    """
    known = PropagationCache()
    found: list[StepPlan] = []
    loaded = {name: load_strategy(name) for name in strategy_names()}
    # Meetings change what is learned: no search chooses replicas that drift.
    alike = {name: strategy for name, strategy in loaded.items() if strategy.drift is None}
    strategies = {name: strategy for name, strategy in alike.items() if applies_to(strategy, setting.graph.dims)}
    # A layout or a call has micro-batches of its own.
    has_own = setting.call is not None or setting.options.micro_batches > 1
    for name, strategy in sorted(strategies.items(), key=lambda item: len(axes_of(item[1]))):
        if has_own and strategy.pipeline is not None:
            continue
        for meaning in axis_assignments(strategy, setting.used, setting.graph.dims):
            if is_late():
                return
            layout = strategy.on_axes(meaning)
            plan = plan_under(setting, layout, known)
            # Each plan with micro-batches has an assignment of its own.
            known_plans = (plan.assignment is one.assignment or (plan.micro and plan == one) for one in found if plan)
            if plan is not None and not any(known_plans):
                found.append(plan)
                given = ", ".join(f"{axis}={'*'.join(own)}" for axis, own in meaning.items() if own)
                called = WHOLE if splits_nothing(plan) else f"{name}({given})"
                yield called, plan.with_options(setting.options)


def plan_under(setting: PlanningProblem, layout: Layout, known: PropagationCache | None = None) -> StepPlan | None:
    try:
        found = propagate_plan(setting.graph, layout, setting.axes, known)
        if found.micro is not None:
            stages = found.assignment.pipelining
            check_in_time(setting.graph, found.micro, None if stages is None else stages.schedule)
    except LayoutError:
        return None
    return found


def check_in_time(graph: NamedGraph, micro: MicroBatches, schedule: Schedule | None) -> None:
    """Raise if an op or a schedule needs all micro-batches at once: the generated graph tells, and no rank runs it."""
    emitted = emit(graph, time_assignment(graph, micro), GroupsOfMicroBatch(None), "sharded", local_inputs=False)
    if schedule is not None:
        check_loops(graph, emitted.graph_module, schedule)


def axis_assignments(
    strategy: Layout, axes: SubMesh, dims: Iterable[str], match_names: bool = False
) -> Iterator[dict[str, tuple[str, ...]]]:
    """Yield the mesh axes of each strategy axis, in every way; several may serve one, in the order of the mesh.

    An axis of the strategy whose dims the model lacks gets none. With `match_names`, a mesh axis named like an axis of
    the strategy serves that one; a strategy of one axis may leave mesh axes idle. The stages of a strategy lie along
    the mesh axis of their name: a strategy with stages has no assignment on a mesh without it.
    """
    own, roles = axes_of(strategy), roles_of(strategy, dims)
    stages = None if strategy.pipeline is None else strategy.pipeline.axis
    if stages is not None and stages not in axes:
        return
    others = [role for role in roles if role != stages]
    matched = [axis == stages or (match_names and axis in roles and len(own) > 1) for axis in axes]
    options = [(axis,) if is_matched else others for axis, is_matched in zip(axes, matched, strict=True)]
    for dealt in product(*options):
        yield {role: tuple(axis for axis, to in zip(axes, dealt, strict=True) if to == role) for role in own}
