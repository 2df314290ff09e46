"""`solve_plan`: the best plan that is found for a graph on a mesh, and how far from the best of all it can be."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from autopar.contracts import check_contracts, size_text
from autopar.conversions import conversions
from autopar.cost.cluster import Cluster
from autopar.cost.costs import Costs
from autopar.cost.evaluate import evaluate
from autopar.decided import Plan
from autopar.errors import AutoparWarning, LayoutError
from autopar.layout.holds import Recompute
from autopar.layout.language import Layout
from autopar.layout.syntax import Guard, Limit, Same
from autopar.planning.decode import plan_of
from autopar.planning.demands import Demands
from autopar.planning.errors import NoPlan
from autopar.planning.experts import expert_plans, plan_under
from autopar.planning.model import Model, build
from autopar.planning.promises import promised
from autopar.planning.recomputing import MODES, layers_of, thinned
from autopar.planning.routes import Routes
from autopar.planning.search import Search
from autopar.planning.setting import PlanOptions, Setting
from autopar.planning.tables import Tables
from autopar.search.problem import Floats
from autopar.search.work import Progress, relative_gap
from autopar.tracing.graph import NamedGraph

__all__ = ["PlanOptions", "Solved", "solve_plan"]

CONTRACTS = (Guard, Limit, Same)
"""Statements about the whole of a plan: they are checked on each that would be the best."""
MOST_WAYS = 27
"""To compute layers again, in a model that is small enough to try them all: three layers, each in three ways."""


@dataclass(frozen=True)
class Solved:
    """A plan, what `evaluate` says it costs, and what is proved of all plans."""

    plan: Plan
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
    axes: Mapping[str, int],
    cluster: Cluster,
    *,
    layout: Layout | None = None,
    memory_bytes: float | None = None,
    options: PlanOptions | None = None,
    time_limit: float = 30.0,
    progress: Callable[[Progress], None] | None = None,
    warm: Plan | None = None,
    experts: bool = True,
) -> Solved:
    """Decide what of a plan is open: all of it, or what `layout` leaves.

    `memory_bytes` is what the plan may hold on each device; by default what the device has. `warm` is a plan to begin
    from; `experts`: whether the strategies of experts are priced as well, in the time that is left.
    """
    began = time.monotonic()
    setting = Setting.of(graph, axes, cluster, options or PlanOptions())
    limit = cluster.device.memory_bytes if memory_bytes is None else memory_bytes
    demands = Demands(graph, axes, layout or Layout(()))
    race = _Race(setting, limit, began, progress, demands)
    if layout is not None and layout.statements:
        plan = plan_under(setting, layout)
        if plan is not None:
            race.offer("layout", setting.options.on(plan))
    # A plan that was made for something else may not do what this layout demands.
    if warm is not None and demands.is_empty and warm.graph == graph.fingerprint and dict(warm.axes) == dict(axes):
        race.offer("an earlier plan", warm)
    tables = Tables(setting, Routes(axes))
    model = _built(setting, demands, tables)
    search = _searched(model, race, np.inf, began + time_limit)
    bound = search.bound
    if race.plan is None or race.passed_seconds < race.seconds:
        model = _built(setting, demands, tables, regather=True)
        hint = search.hinge_prices()
        search = _searched(model, race, limit / 2**30, began + time_limit, hint)
        if layers_of(graph) and setting.trains:
            _recomputed(race, demands, tables, began + time_limit, hint)
        else:
            bound = search.bound
    if experts and not demands.given.statements:
        _with_experts(race, bound, began + time_limit)
    search.best = race.seconds
    search.close(_small_recomputed(search, race, demands, tables) if search.is_limited else ())
    bound = search.proved if search.is_listed else max(bound, search.proved)
    race.tell("search", bound)
    if race.plan is None and race.broken is not None:
        raise race.broken
    if race.plan is None or race.costs is None:
        raise NoPlan(
            f"no plan was found that fits in {size_text(limit)} on each device: the least that was found takes "
            f"{size_text(race.least_bytes)}\n"
            "fix: more devices, a smaller batch, recomputation, or more memory",
            race.least_bytes,
        )
    return Solved(
        race.plan,
        race.costs,
        min(bound, race.seconds),
        time.monotonic() - began,
        race.origin,
        len(model.variables),
        sum(len(variable.states) for variable in model.variables),
    )


def _built(
    setting: Setting,
    demands: Demands,
    tables: Tables,
    regather: bool = False,
    recompute: Mapping[str, Recompute] | None = None,
) -> Model:
    """With what the layout says of layers, and what it promises of the whole."""
    again = {**(recompute or {}), **demands.recompute}
    return promised(build(setting, demands, tables, regather, again), demands, tables)


def _with_experts(race: _Race, bound: float, deadline: float) -> None:
    """The strategies of experts, as long as there is time and one of them could be better."""
    for name, plan in expert_plans(race.setting):
        if relative_gap(race.seconds, bound) == 0.0 or time.monotonic() > deadline:
            return
        race.offer(name, plan)


def _recomputed(race: _Race, demands: Demands, tables: Tables, deadline: float, hint: Floats) -> None:
    """Plans that are fast and do not fit, with layers computed again; then plans that are sought for it."""
    graph = race.setting.graph
    for plan in [plan for plan in (race.passed, race.plan) if plan is not None]:
        for mode in MODES:
            thinned(graph, plan, mode, lambda made: race.offer("search", made), race.limit, demands.recompute)
    for mode in MODES:
        if time.monotonic() > deadline:
            return
        everywhere = dict.fromkeys(layers_of(graph), mode)
        model = _built(race.setting, demands, tables, regather=True, recompute=everywhere)
        _searched(model, race, race.limit / 2**30, deadline, hint)
        if race.plan is not None and race.plan.recompute:
            thinned(graph, race.plan, mode, lambda made: race.offer("search", made), race.limit, demands.recompute)


def _small_recomputed(search: Search, race: _Race, demands: Demands, tables: Tables) -> tuple[Search, ...]:
    """Searches for all ways to compute layers again, where these are few."""
    layers = [path for path in layers_of(race.setting.graph) if path not in demands.recompute]
    layers = layers if race.setting.trains else []
    if not search.is_small or not layers or (1 + len(MODES)) ** len(layers) > MOST_WAYS:
        return ()
    every = (dict(zip(layers, modes, strict=True)) for modes in product(("none", *MODES), repeat=len(layers)))
    return tuple(
        _search_of(
            _built(race.setting, demands, tables, regather=True, recompute=recompute),
            race,
            search.limit_gib,
            search.deadline,
        )
        for recompute in every
        if set(recompute.values()) != {"none"}
    )


def _search_of(model: Model, race: _Race, limit_gib: float, deadline: float, hint: Floats | None = None) -> Search:
    """A search that tells the race of all that it finds."""

    def report(chosen: Sequence[int]) -> tuple[float, float]:
        costs = race.offer("search", plan_of(model, chosen))
        return (np.inf if race.is_broken else costs.step_seconds), costs.memory.peak_bytes / 2**30

    search = Search(model, report, deadline, limit_gib, hint=hint)
    search.best = race.seconds
    return search


def _searched(model: Model, race: _Race, limit_gib: float, deadline: float, hint: Floats | None = None) -> Search:
    search = _search_of(model, race, limit_gib, deadline, hint)
    if search.is_limited and search.least_memory().peak_gib > limit_gib and race.plan is None:
        return search
    search.run()
    search.mix()
    return search


class _Race:
    """The best plan so far that keeps the limit and the layout's contracts, by `evaluate`."""

    def __init__(
        self,
        setting: Setting,
        limit: float,
        began: float,
        progress: Callable[[Progress], None] | None,
        demands: Demands,
    ) -> None:
        self.setting = setting
        self.limit = limit
        self.began = began
        self.progress = progress
        self.demands = demands
        self.broken: LayoutError | None = None
        """The contract that the last plan broke which would have been the best."""
        self.is_broken = False
        """Whether the last plan broke one."""
        self.plan: Plan | None = None
        self.costs: Costs | None = None
        self.origin = ""
        self.seconds = float("inf")
        self.least_bytes = float("inf")
        self.passed: Plan | None = None
        """The fastest plan that does not fit."""
        self.passed_seconds = float("inf")

    def offer(self, origin: str, plan: Plan) -> Costs:
        """Price a plan, and keep it if it is the best that fits."""
        self.is_broken = False
        costs = evaluate(self.setting.graph, plan, self.setting.cluster)
        self.least_bytes = min(self.least_bytes, costs.memory.peak_bytes)
        if costs.memory.peak_bytes > self.limit:
            if costs.step_seconds < self.passed_seconds:
                self.passed, self.passed_seconds = plan, costs.step_seconds
        elif costs.step_seconds < self.seconds and self._keeps_contracts(plan):
            self.plan, self.costs, self.seconds, self.origin = plan, costs, costs.step_seconds, origin
        return costs

    def _keeps_contracts(self, plan: Plan) -> bool:
        layout = self.demands.given
        if not any(isinstance(statement, CONTRACTS) for statement in layout):
            return True
        sent = conversions(self.setting.graph, plan.decisions, plan.outputs, plan.local_inputs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AutoparWarning)  # whoever takes the plan is warned
            try:
                check_contracts(layout, self.setting.graph, plan.decisions, sent)
            except LayoutError as error:
                self.broken, self.is_broken = error, True
                return False
        return True

    def tell(self, stage: str, bound: float) -> None:
        if self.progress is not None:
            self.progress(Progress(stage, time.monotonic() - self.began, self.seconds, bound))
