"""Plans of published strategies: those that apply to a problem, offered to the incumbent while one could be better."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import product

from autopar.cost.costs import Costs
from autopar.errors import LayoutError
from autopar.ir.graph import NamedGraph
from autopar.lowering.collectives.process_groups import GroupsOfMicroBatch
from autopar.lowering.emit import emit
from autopar.lowering.passes.micro_batches import NotInTimeError
from autopar.lowering.passes.pipeline_parts import check_loops
from autopar.mesh import SubMesh
from autopar.sharding.assignment import StepPlan
from autopar.sharding.layout.language import Layout, applies_to, axes_of, load_strategy, roles_of, strategy_names
from autopar.sharding.layout.syntax import MicroBatches
from autopar.sharding.propagation import PropagationCache
from autopar.sharding.schedules import Schedule
from autopar.sharding.time_slice import propagate_plan, time_assignment
from autopar.solver import relative_gap
from autopar.solver.less_memory import offer_with_less_memory
from autopar.solver.search.phases import Incumbent
from autopar.solver.setting import PlanningProblem

__all__ = [
    "WHOLE",
    "StrategyOffers",
    "axis_assignments",
    "check_in_time",
    "plan_under",
    "splits_nothing",
    "strategy_plans",
]

# Published strategies are not priced where no plan can be better by more than this share: a prediction errs by more.
CLOSE = 1e-3

# Strategies that are priced in any case: those of one axis come first, are quick, and are often good.
LEAST_PRICED = 3
# Strategies that take too much memory as they are, and are priced with less.
MOST_SHRUNK = 8

# Name of a plan in which every device does everything, whichever strategy produced it.
WHOLE = "a layout that splits nothing"


def splits_nothing(plan: StepPlan) -> bool:
    """Return whether every device stores and computes everything."""
    assignment = plan.assignment
    held = any(any(layout.splits) for layout in assignment.stored.values())
    splits = held or any(op.choice.splits for op in assignment.ops.values())
    return assignment.pipelining is None and not splits


class StrategyOffers:
    """Offers of published strategies to an incumbent, in the order of `tried_strategies`; each run goes on with it."""

    def __init__(self, incumbent: Incumbent) -> None:
        self.incumbent = incumbent
        self._tried = tried_strategies(incumbent.setting)
        self._priced = 0
        self._too_large: list[tuple[str, StepPlan, Costs]] = []
        self._shrunk = 0

    def run(self, bound: float, deadline: float, until_one_fits: bool) -> None:
        """Price strategies while one could be better and time is left, or while nothing fits."""
        incumbent = self.incumbent
        # Where memory decides, the bound is as sure as the estimates of memory.
        close = CLOSE if incumbent.is_free else 0.0

        def is_late() -> bool:
            if relative_gap(incumbent.seconds, bound) <= close:
                return True
            if not until_one_fits or incumbent.cannot_fit:
                return time.monotonic() > deadline
            return incumbent.plan is not None and self._priced >= LEAST_PRICED and time.monotonic() > deadline

        if is_late():
            return
        for one in self._tried:
            if one is not None:
                self._price(*one)
            if is_late():
                return
        while self._too_large and self._shrunk < MOST_SHRUNK and not is_late():
            fastest = name, plan, costs = min(self._too_large, key=lambda each: each[2].step_seconds)
            self._too_large.remove(fastest)
            self._shrunk += 1
            if costs.step_seconds < incumbent.seconds:
                offer_with_less_memory(incumbent, name, plan, costs, is_late)

    def _price(self, name: str, plan: StepPlan) -> None:
        self._priced += 1
        if self.incumbent.may_improve(plan):
            costs = self.incumbent.offer(name, plan)
            if costs.limited_bytes > self.incumbent.limit:
                self._too_large.append((name, plan, costs))


def strategy_plans(setting: PlanningProblem) -> Iterator[tuple[str, StepPlan]]:
    """Yield the plan of every strategy that applies, named with its axes; equal plans once."""
    return filter(None, tried_strategies(setting))


def tried_strategies(setting: PlanningProblem) -> Iterator[tuple[str, StepPlan] | None]:
    """Yield a named plan for each assignment of axes to each strategy; None if it does not apply or gives a known plan.

    Strategies with few axes come first, as the others have many assignments. To find that one does not apply takes as
    long as to find that it does.
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
            plan = plan_under(setting, strategy.on_axes(meaning), known)
            # Each plan with micro-batches has an assignment of its own.
            known_plans = (plan.assignment is one.assignment or (plan.micro and plan == one) for one in found if plan)
            if plan is None or any(known_plans):
                yield None
                continue
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
    try:
        emitted = emit(graph, time_assignment(graph, micro), GroupsOfMicroBatch(None), "sharded", local_inputs=False)
    except NotInTimeError as error:
        raise error.of(micro) from None
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
