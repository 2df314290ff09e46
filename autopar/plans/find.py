"""Planning: from a graph and a request to a `Plan`, by the cache, the search and the choice of a mesh."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args

from autopar.cost.compute.optimizers import check_optimizer
from autopar.cost.hardware.cluster import Cluster, load_cluster
from autopar.cost.lowered_step import lower_step
from autopar.cost.memory.peak import memory_limit
from autopar.errors import AutoparError, LayoutError
from autopar.ir.graph import NamedGraph
from autopar.ir.invariants import verifying
from autopar.mesh import Mesh
from autopar.plans import cache
from autopar.plans.best_loss import with_best_loss
from autopar.plans.best_order import shapes_in_best_order
from autopar.plans.best_shape import best_of_shapes, share_of
from autopar.plans.cluster_here import cluster_here
from autopar.plans.group_capacity import in_slots
from autopar.plans.loss_pieces import stated_graph
from autopar.plans.micro_counts import counts_of, halves_to_try, with_open_micro
from autopar.plans.plan import Plan, under_layout
from autopar.plans.refused import closest_of, in_a_micro_batch, with_all_memory, with_its_line, with_micro_batches
from autopar.plans.replicas import replicas_of, with_meetings
from autopar.plans.unequal import solve_with_shares, with_speeds
from autopar.sharding.assignment import StepPlan
from autopar.sharding.contracts import check_contracts
from autopar.sharding.layout.language import Layout, choose_layout, parse_memory
from autopar.sharding.layout.source import layout_error
from autopar.sharding.layout.syntax import Limit, MeshStatement, MicroBatches, OpenMicroBatches
from autopar.sharding.options import Outputs, TrainingOptions
from autopar.sharding.pipelining import needs_micro_batches
from autopar.sharding.schedules import Schedule
from autopar.sharding.time_slice import propagate_plan
from autopar.solver import Progress
from autopar.solver.infeasible import NoFeasiblePlan
from autopar.solver.integer.choice import SEARCH, SolverChoice
from autopar.solver.published_strategies import check_in_time
from autopar.solver.shapes import ShapeSearch
from autopar.solver.solve import SolvedPlan, uncollected

__all__ = [
    "PlanRequest",
    "check_outputs",
    "is_memory_limit",
    "plan_graph",
    "plan_under_layout",
    "request_like",
]


# Share of a device's memory. A plan predicts the bytes of tensors only: the device context, buffers of collectives and
# fragmentation took 4 to 12 % more where that was measured (docs/limits.md).
PLANNED_SHARE = 0.9

# A bound further below the step time says nothing about the plan: it is the time of the products alone.
LARGEST_GAP = 0.9


@dataclass(frozen=True)
class PlanRequest:
    """Request for a plan: cluster, limits, time and options, apart from model, mesh and layout."""

    cluster: str | Path | Cluster | None = None
    memory: str | float | None = None
    options: TrainingOptions = field(default_factory=TrainingOptions)
    time_limit: float = 30.0
    cache: bool = True
    # True: any mesh of as many devices may be proposed, with stages of a pipeline too.
    any_mesh: bool = False
    # Who finds the plan and proves its bound.
    solver: SolverChoice = SEARCH
    # The search of a mesh passes the time limit until a plan fits.
    until_one_fits: bool = True
    # Plan of a proposed mesh, which the search of this mesh begins from.
    first: StepPlan | None = None

    def cluster_value(self) -> Cluster:
        if isinstance(self.cluster, Cluster):
            return self.cluster
        return load_cluster(self.cluster) if self.cluster is not None else cluster_here()

    def options_on(self, mesh: Mesh) -> TrainingOptions:
        """Return the options with the links that a mesh gives its axes."""
        check_optimizer(self.options.optimizer, self.options.offload_states)  # fails here, before the search
        return replace(self.options, links=mesh.links)

    def limit_bytes(self, cluster: Cluster, layout: Layout | None) -> int:
        """Return the memory limit in bytes: the lowest of request and layout, else a share of the device."""
        has = float(cluster.device.memory_bytes)
        said = [parse_memory(self.memory)] if isinstance(self.memory, str) else []
        lowest = memory_limit(Layout((*(layout or ()), *said)), has)
        found = [] if lowest is None else [lowest[1]]
        if self.memory is not None and not isinstance(self.memory, str):
            if not (math.isfinite(self.memory) and self.memory > 0):
                raise AutoparError(
                    f"invalid memory={self.memory!r}: expected a size or a share\nfix: bytes, or text as in '70GiB'"
                )
            found.append(float(self.memory))
        return int(min(found, default=PLANNED_SHARE * has))


def request_like(plan: Plan, time_limit: float = 30.0) -> PlanRequest:
    """Return the request that gives another plan comparable with this one."""
    return PlanRequest(plan.cluster, plan.limit_bytes, plan.decided.options, time_limit)


def check_outputs(outputs: str) -> None:
    if outputs not in get_args(Outputs):
        raise AutoparError(f"invalid outputs={outputs!r}: expected one of {', '.join(map(repr, get_args(Outputs)))}")


# -- the search


@uncollected()
def plan_graph(
    graph: NamedGraph,
    meshes: Sequence[Mesh],
    layout: str | Path | Layout | None,
    request: PlanRequest,
    progress: Callable[[Progress], None] | None = None,
    ends: float | None = None,
) -> Plan:
    """Return the best plan on the best of some meshes, those first whose minor axis fills a node.

    All searches end at `ends`, or after the time limit; where nothing fits on the first mesh, no other passes it.
    """
    if not (math.isfinite(request.time_limit) and request.time_limit > 0):
        raise AutoparError(
            f"invalid time_limit={request.time_limit!r}: expected seconds above 0\nfix: as in time_limit=30"
        )
    ends = time.monotonic() + request.time_limit if ends is None else ends
    proposed = _proposed(graph, meshes[0].size, request, progress) if request.any_mesh and layout is None else None
    if proposed is not None:
        return proposed
    each = replace(request, time_limit=request.time_limit / len(meshes))
    best: Plan | None = None
    refused: list[tuple[Mesh, AutoparError]] = []
    for number, mesh in enumerate(_likely_first(meshes, request.cluster_value())):
        left = ends - time.monotonic()
        if number:
            if left <= 0.0:
                break
            each = replace(each, until_one_fits=False)
        seconds = share_of(left, len(meshes) - number)
        beat = math.inf if best is None else best.step_seconds
        try:
            found = _in_micro_batches(graph, mesh, layout, each, progress, seconds, beat)
        except (NoFeasiblePlan, LayoutError) as error:  # a layout may be possible on some meshes only
            refused.append((mesh, error))
            continue
        if best is None or found.step_seconds < best.step_seconds:
            best = found
    if best is None:
        closest = closest_of(refused, len(meshes))
        is_open = isinstance(closest, NoFeasiblePlan) and time.monotonic() < ends
        smaller = with_open_micro(graph, meshes, layout) if is_open else None
        if smaller is None:
            raise closest
        try:
            return plan_graph(graph, meshes, smaller, replace(request, until_one_fits=False), progress, ends)
        except (NoFeasiblePlan, LayoutError) as error:
            raise with_micro_batches(closest, error) from None  # it says more than the error with micro-batches
    return best if layout is None else under_layout(best, layout)


def _likely_first(meshes: Sequence[Mesh], cluster: Cluster) -> list[Mesh]:
    """Return meshes in the order of how well the ranks of the minor axis fill a node."""
    node = cluster.ranks_together(meshes[0].size)
    return sorted(meshes, key=lambda mesh: abs(math.log(list(mesh.whole.values())[-1] / node)))


def _proposed(
    graph: NamedGraph, devices: int, request: PlanRequest, progress: Callable[[Progress], None] | None
) -> Plan | None:
    """Return the best plan on any mesh, by its shapes; None if the model has no such shapes, or if none fits."""
    cluster, options = request.cluster_value(), request.options_on(Mesh("dp=1"))
    limit = request.limit_bytes(cluster, None)

    def on_mesh(
        mesh: Mesh, layout: Layout | None, seconds: float, beat_seconds: float, shared: int, first: StepPlan | None
    ) -> Plan:
        until = request.until_one_fits and beat_seconds == math.inf
        # The cache finds a plan by its time limit: the same share in each run.
        each = replace(request, until_one_fits=until, time_limit=request.time_limit / shared, first=first)
        # In both orders of a sequence.
        return _in_micro_batches(graph, mesh, layout, each, progress, seconds, beat_seconds)

    def search(ordered: NamedGraph, seconds: float) -> Plan | None:
        ends = time.monotonic() + seconds
        shapes = ShapeSearch.of(ordered, cluster, options, devices, limit, ends - seconds / 2)
        if shapes is None:
            return None
        shapes.gives_up = ends
        return best_of_shapes(shapes, ends, on_mesh, lambda found, mesh: _plan_of(ordered, found, mesh, cluster, limit))

    return shapes_in_best_order(graph, devices, options.outputs, request.time_limit, search)


def _in_micro_batches(
    graph: NamedGraph,
    mesh: Mesh,
    layout: str | Path | Layout | None,
    request: PlanRequest,
    progress: Callable[[Progress], None] | None,
    seconds: float,
    beat_seconds: float,
) -> Plan:
    """Return the best plan on a mesh; where the number of micro-batches is open, with the best of them."""
    said = None if layout is None else choose_layout(layout, mesh.whole)
    if said is not None and said.drift is not None:
        return _of_replicas(graph, mesh, said, request, progress, seconds)
    if said is None or (said.open_micro_batches is None and not needs_micro_batches(said, mesh.whole)):
        return _on_mesh(graph, mesh, layout, request, progress, seconds, beat_seconds)
    asked = said.open_micro_batches or OpenMicroBatches()
    counts = asked.candidates or counts_of(graph, asked.dim, needs_micro_batches(said, mesh.whole))
    ends, best, refused = time.monotonic() + seconds, None, None
    for number, count in enumerate(counts):
        if refused is not None and best is None:
            if time.monotonic() > ends:
                break
            request = replace(request, until_one_fits=False)
        micro = MicroBatches(count, asked.dim, asked.halves, asked.span) if count > 1 or asked.halves else None
        left = max(seconds / len(counts), (ends - time.monotonic()) / (len(counts) - number))
        left = left if best is not None or refused is None else max(0.0, min(left, ends - time.monotonic()))
        beat = beat_seconds if best is None else min(beat_seconds, best.step_seconds)
        try:
            found = _on_mesh(graph, mesh, said.with_micro_batches(micro), request, progress, left, beat)
            # The bound of a pipeline omits idle time, so a search may end with a slower plan.
            best = min(best or found, found, key=lambda plan: plan.step_seconds)
        except (NoFeasiblePlan, LayoutError) as error:
            if best is not None:
                break  # with more micro-batches it takes longer
            refused = refused or error
    if best is None:
        assert refused is not None, "there is a number of micro-batches"
        raise refused
    for micro in halves_to_try(best, asked) if said.pipeline is None else ():
        with suppress(NoFeasiblePlan, LayoutError):
            left, beat = max(seconds / len(counts), ends - time.monotonic()), min(beat_seconds, best.step_seconds)
            found = _on_mesh(graph, mesh, said.with_micro_batches(micro), request, progress, left, beat)
            best = min(best, found, key=lambda plan: plan.step_seconds)
    return best


def _of_replicas(
    graph: NamedGraph,
    mesh: Mesh,
    layout: Layout,
    request: PlanRequest,
    progress: Callable[[Progress], None] | None,
    seconds: float,
) -> Plan:
    """Return the best plan of one replica, with the meetings that the layout states.

    Meetings keep anchors, whose size follows from the plan: one that then does not fit is searched again with less.
    """
    cluster = request.cluster_value()
    graph, inner, own, drift = replicas_of(graph, layout, mesh, cluster)
    limit = request.limit_bytes(cluster, inner)
    found = with_meetings(_in_micro_batches(graph, own, inner, request, progress, seconds, math.inf), drift)
    if found.fits:
        return found
    less = replace(request, memory=max(1.0, limit - found.costs.memory.meetings_bytes))
    again = with_meetings(_in_micro_batches(graph, own, inner, less, progress, seconds, math.inf), drift)
    return replace(again, limit_bytes=limit)


def _on_mesh(
    graph: NamedGraph,
    mesh: Mesh,
    layout: str | Path | Layout | None,
    request: PlanRequest,
    progress: Callable[[Progress], None] | None,
    seconds: float,
    beat_seconds: float,
) -> Plan:
    """Return the best plan on a mesh, in the order of the sequence and with the loss that the layout states, or in the
    faster ones.
    """
    said = None if layout is None else choose_layout(layout, mesh.whole)
    graph = graph if said is None else in_slots(graph, said)
    limit = request.limit_bytes(request.cluster_value(), said)

    def search(ordered: NamedGraph, seconds: float, beat_seconds: float) -> Plan:
        return _in_one_order(ordered, mesh, layout, request, progress, seconds, beat_seconds)

    return with_best_loss(graph, mesh, said, request.options.outputs, limit, search, seconds, beat_seconds)


def _in_one_order(
    graph: NamedGraph,
    mesh: Mesh,
    layout: str | Path | Layout | None,
    request: PlanRequest,
    progress: Callable[[Progress], None] | None,
    seconds: float,
    beat_seconds: float,
) -> Plan:
    axes = mesh.whole
    cluster = request.cluster_value()
    given = None if layout is None else with_speeds(graph, choose_layout(layout, axes), axes, cluster, mesh.links)
    limit = request.limit_bytes(cluster, given)
    # The limit is in `limit` already. A mesh statement is checked where the layout is read.
    said = None if given is None else Layout(tuple(one for one in given if not is_memory_limit(one)), given.name)
    demanded = None if said is None else Layout(tuple(one for one in said if not isinstance(one, MeshStatement)))
    options = request.options_on(mesh)
    if said is not None:
        schedule = said.pipeline.schedule if said.pipeline and axes.get(said.pipeline.axis, 1) > 1 else None
        _check_in_time(graph, said.micro_batches, schedule, options.micro_batches)
    key = cache.key(graph, mesh, cluster, demanded, limit, options, request.time_limit, request.solver)
    known = cache.find(key, graph, cluster) if request.cache else None
    within = demanded is not None and bool(demanded.statements)
    # A cached plan is a file that anyone may have changed.
    if (
        known is not None
        and known.mesh == mesh
        and known.costs.limited_bytes <= limit
        and known.decided.options == options
    ):
        return replace(known, limit_bytes=limit, within_layout=within, target="")
    known_plans = {"an earlier plan": cache.last(graph, mesh) if request.cache else None, "search": request.first}
    try:
        solved = solve_with_shares(
            graph,
            axes,
            cluster,
            layout=demanded,
            memory_bytes=limit,
            options=options,
            time_limit=seconds,
            progress=progress,
            warm={origin: plan for origin, plan in known_plans.items() if plan is not None},
            beat_seconds=beat_seconds,
            solver=request.solver,
            until_one_fits=request.until_one_fits,
        )
    except LayoutError as error:
        raise in_a_micro_batch(error, said) from None
    except NoFeasiblePlan as error:
        error = error if given is None else with_its_line(error, given, limit, cluster)
        is_usual = limit == PlanRequest().limit_bytes(cluster, None)
        raise with_all_memory(error, cluster.device.memory_bytes) if is_usual else error from None
    plan = _plan_of(graph, solved, mesh, cluster, limit, said, within)
    if request.cache:
        cache.keep(key, plan)
    return plan


def _plan_of(
    graph: NamedGraph,
    solved: SolvedPlan,
    mesh: Mesh,
    cluster: Cluster,
    limit: int,
    said: Layout | None = None,
    within: bool = False,
) -> Plan:
    """Return the plan that the solver found, as its text says it."""
    decided = canonical(graph, solved.plan)
    if said is not None:
        check_contracts(said, graph, decided.assignment, lower_step(graph, decided).reshard_plan.inserted())
    bound = solved.bound_seconds if solved.gap <= LARGEST_GAP else 0.0
    plan = Plan(
        graph, decided, mesh, cluster, limit, bound, solved.origin, within_layout=within, bound_by=solved.bound_by
    )
    read = plan.written.read if decided.micro is not None else None
    if read is not None:
        # The stages that run follow from the text: which ops vary in time depends on all shardings.
        again = read.with_options(decided.options)
        plan = plan if again == decided else replace(plan, decided=again)
    if plan.decided == decided:
        assert not verifying() or plan.costs == solved.costs, "a plan costs what it cost in the search"
        plan.__dict__["costs"] = solved.costs
    return plan


def _check_in_time(graph: NamedGraph, micro: MicroBatches | None, schedule: Schedule | None, calls: int) -> None:
    """Raise if the batch of one of the calls of a step cannot be split into these micro-batches."""
    if micro is None or micro.parts == 1:
        return
    if calls > 1:
        raise layout_error(
            "E0",
            f"'micro {micro.count}' and micro_batches={calls} both split the batch of a step",
            "keep one of them",
            micro.span,
        )
    check_in_time(graph, micro, schedule)


def is_memory_limit(statement: object) -> bool:
    return isinstance(statement, Limit) and statement.quantity == "memory"


def canonical(graph: NamedGraph, decided: StepPlan) -> StepPlan:
    """Return the plan as a layout expresses it: parameters without partial sums, broadcasts begin at their uses."""
    assignment = decided.assignment
    values = {
        name: replace(layout, partial=frozenset(), broadcast=frozenset())
        if name in graph.tensors and graph.tensors[name].kind == "param"
        else layout
        for name, layout in assignment.values.items()
    }
    recompute = {path: mode for path, mode in decided.recompute.items() if mode != "none"}
    return replace(decided, assignment=replace(assignment, values=values, recompute=recompute))


def plan_under_layout(
    graph: NamedGraph, mesh: Mesh, layout: str | Path | Layout, request: PlanRequest, origin: str = ""
) -> Plan:
    """Return the plan of a layout, completed by propagation and not by search."""
    cluster = request.cluster_value()
    graph, said, mesh, drift = replicas_of(graph, choose_layout(layout, mesh.whole), mesh, cluster)
    graph = stated_graph(graph, said, request.options.outputs)
    said = with_speeds(graph, said, mesh.whole, cluster, mesh.links)
    limit = request.limit_bytes(cluster, said)
    kept = Layout(tuple(one for one in said if not is_memory_limit(one)), said.name)
    decided = propagate_plan(graph, kept, mesh.whole).with_options(request.options_on(mesh))
    stages = decided.assignment.pipelining
    _check_in_time(graph, decided.micro, None if stages is None else stages.schedule, decided.options.micro_batches)
    return under_layout(with_meetings(Plan(graph, decided, mesh, cluster, limit, None, origin), drift), said)
