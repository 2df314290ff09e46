"""Plan of a whole model from a priced shape: its layers as those of the short graph, stages as they were designed.

`evaluate` prices the plan. Where the memory of a stage is not what its segments add up to, the stages are designed once
more with limits that are off by as much. The bound is that of the model of the whole graph, without any search.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from math import prod

import numpy as np

from autopar.cost.network import Network
from autopar.errors import LayoutError
from autopar.mesh import SubMesh
from autopar.sharding.assignment import Pipelining, StepPlan
from autopar.sharding.bound_layout import BoundLayout
from autopar.sharding.layout.language import Layout
from autopar.sharding.layout.syntax import MicroBatches, PipelineStatement
from autopar.sharding.schedules import most_in_flight, orders
from autopar.sharding.time_slice import slice_in_time
from autopar.solver.mesh_shape import Shape
from autopar.solver.model.cost_tables import CostTables
from autopar.solver.order_bound import order_bound
from autopar.solver.published_strategies import check_in_time
from autopar.solver.search.count_once import count_once
from autopar.solver.search.joined_axes import MOST_AXES
from autopar.solver.search.lagrangian import LagrangianSearch
from autopar.solver.search.phases import Incumbent, SearchPhases
from autopar.solver.segments import STAGES, layer_modes, least_sent_bytes, segments_of, spread, staged
from autopar.solver.setting import MicroBatchedCall, PlanningProblem
from autopar.solver.shapes import PricedShape, ShapeSearch
from autopar.solver.solve import SolvedPlan
from autopar.solver.stage_design import StageDesign, design_stages
from autopar.solver.stages import least_shares

__all__ = ["StagedPlan", "plan_without_stages", "with_bound"]

# Designs that are priced: the first one tells how far the memory of each stage is off.
MOST_DESIGNS = 3
# Limits that differ by this share of the memory give the same design.
NEAR = 0.002
# The next design is priced if it promises to save more than this share of the step, or if none fits yet.
WORTH = 0.002
# Relative precision of the multipliers of the bound.
PRECISION = 1e-2


class StagedPlan:
    """Plan of a shape with stages, priced and without a bound; its stages are designed again by these prices."""

    def __init__(self, search: ShapeSearch, priced: PricedShape) -> None:
        self.search, self.priced = search, priced
        self.micro = _micro_of(priced.shape)
        self.began = time.monotonic()
        setting = _setting(search, priced)
        bound_layout = BoundLayout(setting.graph, Layout(()), setting.axes)
        self.incumbent = Incumbent(setting, search.limit, self.began, None, bound_layout)
        # The next design, with its limits; None if there is none.
        self.design: StageDesign | None = priced.design
        self.limits = [search.limit] * priced.shape.stages
        self.designs = 0
        # Seconds that the next design is likely to take.
        self.likely_seconds = math.inf
        # All designs have one schedule, and the layers that the short graph lacks run the same ops.
        check_in_time(search.short.graph, self.micro, priced.design.schedule[0])
        while not self.fits and self._next():
            pass

    @property
    def fits(self) -> bool:
        return self.incumbent.plan is not None

    @property
    def solved(self) -> SolvedPlan:
        """Return the best plan so far."""
        plan, costs = self.incumbent.plan, self.incumbent.costs
        assert plan is not None, "asked for where stages fit"
        assert costs is not None, "a plan has costs"
        return SolvedPlan(plan, costs, 0.0, time.monotonic() - self.began, "search", 0, 0)

    def improved(self) -> StagedPlan:
        """Price the designs that are left."""
        while self._next():
            pass
        return self

    def _next(self) -> bool:
        """Price a design and make the next one; return False if there is none."""
        design, search = self.design, self.search
        plan = None
        if design is not None and self.designs < MOST_DESIGNS:
            plan = _whole_plan(search, self.priced, design, self.micro)
        if design is None or plan is None:
            return False
        costs = self.incumbent.offer("search", plan)
        self.designs += 1
        # The estimate is off by as much under another design of these stages.
        missed = [stage.memory.peak_bytes - peak for stage, peak in zip(costs.stages, design.stage_peaks, strict=True)]
        tight = [search.limit - more for more in missed]
        is_near = max(abs(one - other) for one, other in zip(tight, self.limits, strict=True)) < search.limit * NEAR
        self.limits, self.design, self.likely_seconds = tight, None, self.incumbent.seconds
        if not is_near:
            shape, sends = self.priced.shape, search.sends(self.priced.costs, self.priced.shape)
            stages, count = shape.stages, shape.count
            again = design_stages(self.priced.costs, search.cluster, stages, count, design.schedule, tight, sends)
            likely = costs.step_seconds * again.seconds / design.seconds if again is not None else math.inf
            if again != design and (not self.fits or likely < (1 - WORTH) * self.incumbent.seconds):
                self.design, self.likely_seconds = again, min(self.likely_seconds, likely)
        return True


def plan_without_stages(search: ShapeSearch, priced: PricedShape) -> StepPlan | None:
    """Return the plan of the whole graph under a design of one stage; None if its segments are others."""
    known = _segments(search, priced, search.some_micro)
    return None if known is None else _spread(search, priced, priced.design)


def with_bound(search: ShapeSearch, priced: PricedShape, solved: SolvedPlan) -> SolvedPlan:
    """Return a plan of a shape with its bound.

    It holds for all plans with these micro-batches and this schedule on this mesh, whose stages are cut between layers.
    """
    shape, pipelining = priced.shape, solved.plan.assignment.pipelining
    assert pipelining is not None, "a plan with stages"
    micro, network = _micro_of(shape), Network(search.cluster, SubMesh(shape.mesh), search.options.links)
    least = least_sent_bytes(search.short, micro, prod(shape.axes.values()))
    send = network.seconds("send", (STAGES,), least) if least else 0.0
    work = sum(stage.pass_seconds for stage in solved.costs.stages)
    shares_cores = search.cluster.device.core_fraction < 1.0
    passes, sends = least_shares(pipelining, shape.count, shares_cores)[0], 0.0
    schedule = pipelining.schedule, pipelining.chunks, pipelining.more
    known = None if shares_cores else order_bound(shape.stages, shape.count, *schedule, round(send / work, 6))
    if known is not None and known.passes * work + known.sends * send > passes * work:
        passes, sends = known
    setting = _setting(search, priced)
    if len(setting.used) <= MOST_AXES:
        bound = _bound(setting, pipelining, passes, search.limit)
    else:
        # The model of a whole graph on more axes takes too long: equal shares of the work of one rank.
        bound = passes * search.ideal_seconds * shape.stages / shape.count
    bound += sends * send
    return replace(solved, bound_seconds=min(bound, solved.costs.step_seconds))


def _micro_of(shape: Shape) -> MicroBatches:
    micro = shape.micro
    assert micro is not None, "stages run micro-batches"
    return micro


def _setting(search: ShapeSearch, priced: PricedShape) -> PlanningProblem:
    micro, options = _micro_of(priced.shape), replace(search.options, micro_batches=priced.shape.count)
    call = MicroBatchedCall(search.graph, micro)
    sliced = slice_in_time(search.graph, micro)
    return PlanningProblem.of(sliced, SubMesh(priced.shape.axes), search.cluster, options, call)


def _whole_plan(search: ShapeSearch, priced: PricedShape, design: StageDesign, micro: MicroBatches) -> StepPlan | None:
    """Return the plan of the whole graph under a design; None if its segments are others."""
    schedule, chunks, more = design.schedule
    statement = PipelineStatement(STAGES, schedule, chunks, more)
    every = _segments(search, priced, micro)
    if every is None:
        return None
    starts = np.array(design.starts)
    parts = {op: int((starts <= number).sum()) for number, (_, ops) in enumerate(every) for op in ops}
    plan = _spread(search, priced, design)
    try:
        stages = staged(search.graph, micro, plan.axes, parts, statement, design.stages)
    except LayoutError:
        return None  # a parameter that all stages would need
    return replace(plan, assignment=replace(plan.assignment, pipelining=stages))


def _segments(
    search: ShapeSearch, priced: PricedShape, micro: MicroBatches
) -> list[tuple[str, tuple[str, ...]]] | None:
    """Return the segments of the whole graph; None if they are others than those that were priced."""
    found = segments_of(search.graph, micro)
    return found if tuple(path for path, _ in found) == priced.costs.layers else None


def _spread(search: ShapeSearch, priced: PricedShape, design: StageDesign) -> StepPlan:
    """Return the plan of the whole graph with the layers and recompute modes of a design, without stages."""
    plan = spread(search.short, priced.costs.plan)
    return replace(plan, assignment=replace(plan.assignment, recompute=layer_modes(priced.costs.layers, design.modes)))


def _bound(setting: PlanningProblem, pipelining: Pipelining, passes: float, limit: float) -> float:
    """Return a lower bound on all plans of a problem, whose steps take so many micro-batches of work."""
    assert setting.call is not None, "stages run micro-batches"
    in_flight = _mean_in_flight(pipelining, setting.call.micro.count)
    # What is sent once in a step may be hidden.
    call = replace(setting.call, pipelining=pipelining, in_flight=in_flight, shares=(passes, 0.0, 1.0))
    staged_setting = PlanningProblem.of(setting.graph, setting.axes, setting.cluster, setting.options, call)
    bound_layout = BoundLayout(setting.graph, Layout(()), setting.axes)
    incumbent = Incumbent(staged_setting, limit, time.monotonic(), None, bound_layout)
    work = SearchPhases(staged_setting, bound_layout, incumbent, CostTables(staged_setting), math.inf)
    model = work.model(is_limited=True)
    search = LagrangianSearch(model, _unpriced, math.inf, limit / 2**30, gap=PRECISION)
    search.highest_multipliers(limit / 2**30)
    count_once(search, prices_plans=False)
    return search.bound


def _unpriced(chosen: object) -> tuple[float, float]:
    raise AssertionError("a bound prices no plan")


def _mean_in_flight(pipelining: Pipelining, count: int) -> float:
    every = orders(pipelining.stages, count, pipelining.schedule, pipelining.chunks, pipelining.more, halves=True)
    flights = most_in_flight(every, pipelining.chunks)
    return sum(flights) / len(flights)
