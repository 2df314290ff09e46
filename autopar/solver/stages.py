"""Stages of a plan: where the layout leaves them open, schedule, cuts and the recomputation of each stage.

All stages are searched as one, with the micro-batches that the first stage keeps. Given the shardings of that search,
the cuts balance the times that were found, and each stage recomputes as little as its own memory allows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from autopar.cost.costs import Costs
from autopar.cost.lowered_step import lower_step
from autopar.cost.profile import op_seconds
from autopar.cost.unequal_devices import device_speeds, rank_kinds
from autopar.errors import LayoutError
from autopar.mesh import SubMesh
from autopar.sharding.assignment import Pipelining, StepPlan
from autopar.sharding.layout.language import Layout
from autopar.sharding.layout.syntax import PipelineStatement, Recompute
from autopar.sharding.pipelining import check_pipeline, with_stages
from autopar.sharding.schedules import most_in_flight, orders
from autopar.sharding.time_slice import time_assignment
from autopar.solver.model.recompute_variables import mode_counts
from autopar.solver.search.phases import Incumbent
from autopar.solver.setting import MicroBatchedCall, PlanningProblem
from autopar.solver.stage_design import SCHEDULES

__all__ = ["least_shares", "open_schedules", "settle_stages", "stages_of", "with_call"]

# Schedules of `pipeline pp ?` on a given mesh. Each is priced as a whole, so fewer numbers of chunks are tried.
PRICED = tuple(one for one in SCHEDULES if one[1] <= 4 or one[1] % 2 == 0)

# Share of the bound without communication that is exchanged for communication that happens once.
GIVEN_UP = 0.01

# The memory of a stage is not quite linear in its recomputed layers.
MOST_ADJUSTMENTS = 4


def stages_of(
    setting: PlanningProblem, layout: Layout, axes: SubMesh, work: Mapping[str, float] | None = None
) -> Pipelining | None:
    """Return the stages of a layout; where it names no cuts, their parts take about equal time.

    `work` has the time of each op. Without it the time on one rank counts, which has about the same shares.
    """
    assert setting.call is not None, "a pipeline has micro-batches"
    alone = time_assignment(setting.call.graph, setting.call.micro)
    work = setting.whole_seconds if work is None else work
    return with_stages(setting.call.graph, layout, axes, alone, work, _slowness(setting, layout, axes)).pipelining


def _slowness(setting: PlanningProblem, layout: Layout, axes: SubMesh) -> tuple[float, ...]:
    """Return the time of each stage for equal work, by its slowest ranks; none where all are alike."""
    cluster, pipeline, links = setting.whole_cluster or setting.cluster, layout.pipeline, setting.options.links
    if pipeline is None or not cluster.part:
        return ()
    stages = [rank_kinds(cluster, axes, links, {pipeline.axis: stage}) for stage in range(axes[pipeline.axis])]
    devices = {kind.part: kind.device for kinds in stages for kind in kinds}
    # The other axes share a micro-batch: small ops wait for the host on every device alike.
    dim = "batch" if setting.call is None else setting.call.micro.dim
    ranks = axes.size // axes[pipeline.axis]
    speeds = device_speeds(setting.graph, dim, devices, ranks, cluster)
    return tuple(max(kind.samples / speeds[kind.part] for kind in kinds) for kinds in stages)


def open_schedules(layout: Layout, axes: SubMesh) -> Iterator[Layout]:
    """Yield the layout with each schedule that it leaves open; the layout alone if it names one."""
    pipeline, cut = layout.pipeline, layout.cut
    if pipeline is None or not pipeline.is_open or axes[pipeline.axis] == 1:
        yield layout
        return
    # Names of cuts and numbers of parts are for this number of parts.
    named = (cut is not None and bool(cut.before)) or bool(layout.part_pins)
    for schedule, chunks, more in PRICED:
        if named and chunks > 1:
            continue
        statement = PipelineStatement(pipeline.axis, schedule, chunks, more, span=pipeline.span)
        made = Layout(tuple(statement if one is pipeline else one for one in layout), layout.name)
        try:
            check_pipeline(made, axes)
        except LayoutError:
            continue  # too few micro-batches
        yield made


def with_call(setting: PlanningProblem, layout: Layout, axes: SubMesh) -> MicroBatchedCall:
    """Return the call of a problem with the stages of a layout, and what all of its open schedules may need."""
    call = setting.call
    assert call is not None, "a pipeline has micro-batches"
    found = []
    for one in open_schedules(layout, axes):
        try:
            found.append(stages_of(setting, one, axes))
        except LayoutError:
            if not found:
                raise
            break  # too few ops for so many parts
    pipelines = [one for one in found if one is not None]
    if not pipelines:
        return call
    count = call.micro.count
    flights = [
        most_in_flight(orders(one.stages, count, one.schedule, one.chunks, one.more), one.chunks)[0]
        for one in pipelines
    ]
    # The plans of the search are priced under the schedule that needs the most memory.
    in_flight, _, pipelining = max(zip(flights, range(len(flights)), pipelines, strict=True))
    shares_cores = setting.cluster.device.core_fraction < 1.0
    passes, ends, tails = zip(*(least_shares(one, count, shares_cores) for one in pipelines), strict=True)
    return replace(call, pipelining=pipelining, in_flight=in_flight, shares=(min(passes), min(ends), max(tails)))


def least_shares(one: Pipelining, count: int, shares_cores: bool = False) -> tuple[float, float, float]:
    """Return the shares of `PlanningProblem.shares` under a schedule.

    A stage works for all micro-batches, and waits while the parts before its first one run. The step takes at least a
    weighted mean of the stages. With these weights the time of each stage counts alike, however the model is cut. The
    chunks of a stage take equal times. Stages that share cores lose no time: those that compute have the cores of those
    that wait.

    What a stage sends once may fill its waiting. So the step also takes at least the mean work of the stages, and what
    they send that does not fit beside their first forwards or last backwards. A mean of both bounds holds; it gives up
    at most `GIVEN_UP` of the first.
    """
    if shares_cores:
        return count / one.stages, 1.0 / one.stages, 1.0
    # While a stage waits for backwards, gradients of weights may fill the time: at most half of the work of a part.
    fill = 0.5 if one.schedule == "zero_bubble" else 1.0 / one.chunks
    left = 1.0 - fill / count
    passes = fill / (1.0 - left**one.stages)
    above = passes - count / one.stages
    share = min(1.0, GIVEN_UP * passes / above) if above > 0.0 else 1.0
    # The first forwards of all chunks, or their last backwards, stand in a row of as many micro-batches.
    return passes - share * above, share / one.stages, float(one.stages if one.chunks > 1 else 1)


def settle_stages(incumbent: Incumbent, layout: Layout, axes: SubMesh) -> None:
    """Offer the best plan with other cuts, with each open schedule, and with recomputation by stage."""
    setting, plan, cut = incumbent.setting, incumbent.plan, layout.cut
    if plan is None or plan.assignment.pipelining is None or setting.call is None:
        return
    named = cut is not None and bool(cut.before)
    work = None if named else op_seconds(lower_step(setting.call.graph, plan), setting.cluster)
    tried: list[tuple[float, StepPlan]] = [(incumbent.seconds, plan)]
    for one in open_schedules(layout, axes):
        try:
            stages = stages_of(setting, one, axes, work)
        except LayoutError:
            continue  # too few ops for so many parts
        other = replace(plan, assignment=replace(plan.assignment, pipelining=stages))
        tried.append((incumbent.offer(incumbent.origin, other).step_seconds, other))
    # A schedule that does not fit may fit with more recomputation.
    _recompute_by_stage(incumbent, min(tried, key=lambda each: each[0])[1])


def _recompute_by_stage(incumbent: Incumbent, plan: StepPlan) -> None:
    """Offer the plan with the least recomputation that the memory of each stage allows."""
    setting, pipelining = incumbent.setting, plan.assignment.pipelining
    assert pipelining is not None, "a pipeline has stages"
    fixed = {path: mode for path, mode in plan.recompute.items() if path in incumbent.bound_layout.recompute}
    layers = [path for path in setting.graph.ops_of_layers if path not in incumbent.bound_layout.recompute]
    if not setting.trains or not layers:
        return
    own = _layers_by_stage(setting, pipelining, layers)
    states = setting.modes
    if "offload" in states and not setting.costs(plan.with_recompute(dict.fromkeys(layers, "offload"))).fits_host:
        states = states[:-1]
    costs = [setting.costs(plan.with_recompute({**fixed, **dict.fromkeys(layers, mode)})) for mode in states]
    limits = [incumbent.limit] * pipelining.stages
    for _ in range(MOST_ADJUSTMENTS):
        modes = {
            path: mode
            for stage, paths in enumerate(own)
            for path, mode in _modes(costs, states, stage, paths, limits[stage])
        }
        kept = {path: mode for path, mode in modes.items() if mode != "none"}
        found = incumbent.offer(incumbent.origin, plan.with_recompute({**fixed, **kept}))
        peaks = [stage.memory.peak_bytes for stage in found.stages]
        if max(peaks) <= incumbent.limit:
            return
        limits = [limit - max(0.0, peak - incumbent.limit) for limit, peak in zip(limits, peaks, strict=True)]


def _layers_by_stage(setting: PlanningProblem, pipelining: Pipelining, layers: Sequence[str]) -> list[list[str]]:
    """Return the layers of each stage, by their first op."""
    found: list[list[str]] = [[] for _ in range(pipelining.stages)]
    for path, ops in setting.graph.ops_of_layers.items():
        part = next((pipelining.parts[op] for op in ops if op in pipelining.parts), None)
        if path in layers and part is not None:
            found[part % pipelining.stages].append(path)
    return found


def _modes(
    costs: Sequence[Costs], states: Sequence[Recompute], stage: int, layers: Sequence[str], limit: float
) -> Iterator[tuple[str, Recompute]]:
    """Yield the mode of each layer of a stage: the fastest that fit, by the costs with all layers in one mode."""
    seconds = [one.stages[stage].busy_seconds for one in costs]
    peaks = [one.stages[stage].memory.peak_bytes for one in costs]
    count = len(layers)

    def mean(values: Sequence[float], counts: Sequence[int]) -> float:
        return sum(value * each for value, each in zip(values, counts, strict=True)) / max(1, count)

    ways = mode_counts(count, len(states))
    least = min(ways, key=lambda way: mean(peaks, way))
    fitting = [way for way in ways if mean(peaks, way) <= limit] or [least]
    best = min(fitting, key=lambda way: mean(seconds, way))
    modes = [mode for mode, each in zip(reversed(states), reversed(best), strict=True) for _ in range(each)]
    yield from zip(layers, modes, strict=True)
