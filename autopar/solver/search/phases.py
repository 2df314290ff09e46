"""Phases of the search of one mesh, without a memory limit, then with it; the incumbent: the best plan so far."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import prod

import numpy as np

from autopar.cost.compute.fastest_rate import fastest_flops_per_second
from autopar.cost.compute.optimizers import optimizer_of
from autopar.cost.costs import Costs
from autopar.errors import AutoparWarning, LayoutError
from autopar.sharding.assignment import StepPlan
from autopar.sharding.bound_layout import BoundLayout
from autopar.sharding.contracts import check_contracts
from autopar.sharding.layout.language import Layout
from autopar.sharding.layout.source import layout_error
from autopar.sharding.layout.syntax import Contract, Recompute
from autopar.sharding.offload import offloaded
from autopar.sharding.recompute import recompute_regions, recomputed_ops
from autopar.sharding.reshard.reshard import NoSteps
from autopar.sharding.reshard_insertion import inserted_reshards
from autopar.solver import Floats, Progress, relative_gap
from autopar.solver.candidates import options_of
from autopar.solver.infeasible import OutOfTime
from autopar.solver.model.build import build, plan_of
from autopar.solver.model.cost_tables import CostTables
from autopar.solver.model.guard_factors import forbid_broken
from autopar.solver.model.model import Model
from autopar.solver.model.objective import peak_gib
from autopar.solver.model.recompute_variables import STATES
from autopar.solver.search.count_once import count_once
from autopar.solver.search.join_buckets import JoinedBuckets
from autopar.solver.search.joined_axes import MOST_AXES, AxisRoles, JoinedAxes, joined_meshes, ways_of
from autopar.solver.search.lagrangian import LagrangianSearch
from autopar.solver.search.lower_memory import least_memory, lower_memory, may_fit, splice_plans
from autopar.solver.search.prove_small import SMALL
from autopar.solver.setting import PlanningProblem


class Incumbent:
    """Best plan so far that keeps the memory limit and the layout's contracts, by `evaluate`."""

    def __init__(
        self,
        setting: PlanningProblem,
        limit: float,
        began: float,
        progress: Callable[[Progress], None] | None,
        bound_layout: BoundLayout,
    ) -> None:
        self.setting = setting
        self.limit = limit
        self.began = began
        self.progress = progress
        self.bound_layout = bound_layout
        self.broken: LayoutError | None = None
        """The contract that the last plan broke which would have been the best."""
        self.is_broken = False
        """True where the last plan broke a contract, or left more on the host than fits."""
        self.exceeds_host = False
        """True where some plan left more on the host than fits."""
        self.plan: StepPlan | None = None
        self.costs: Costs | None = None
        self.origin = ""
        self.seconds = float("inf")
        self.least_bytes = float("inf")
        self.cannot_fit = False
        """True where the estimates of memory show that no plan fits: the search then ends with its time."""
        self.tried: set[tuple[PlanningProblem, Recompute]] = set()
        """Recompute modes of all layers in which the least memory of a problem was searched."""
        self.passed_seconds = float("inf")
        """Seconds of the fastest plan that does not fit."""

    @property
    def floor(self) -> float:
        """Lower bound on every plan: the FLOPs of the model at the highest rate of the devices."""
        if self.costs is None:
            return 0.0
        device, tensors = self.setting.cluster.device, self.setting.graph.tensors.values()
        dtypes = {each.dtype for each in tensors if each.dtype.is_floating_point}
        rates = [fastest_flops_per_second(device, dtype) for dtype in dtypes]
        return self.costs.flops / self.setting.ranks / max(rates) if rates else 0.0

    def offer(self, origin: str, plan: StepPlan) -> Costs:
        """Price a plan, and keep it if it is the best that fits."""
        self.is_broken = False
        plan = self.setting.whole_plan(plan)
        costs = self.setting.costs(plan)
        peak = costs.limited_bytes
        if not costs.fits_host:
            self.is_broken = self.exceeds_host = True
            return costs
        if peak > self.limit:
            self.passed_seconds = min(self.passed_seconds, costs.step_seconds)
        is_best = peak <= self.limit and costs.step_seconds < self.seconds
        if (is_best or peak < self.least_bytes) and self.keeps_contracts(plan):
            self.least_bytes = min(self.least_bytes, peak)
            if is_best:
                self.plan, self.costs, self.seconds, self.origin = plan, costs, costs.step_seconds, origin
        return costs

    @property
    def is_open(self) -> bool:
        """Return whether no plan fits yet, and some may."""
        return self.plan is None and not self.cannot_fit

    @property
    def is_free(self) -> bool:
        """Return whether no faster plan than the best one was too large: the limit on memory costs nothing so far."""
        return self.plan is not None and self.seconds <= self.passed_seconds

    @property
    def offloads(self) -> bool:
        """Return whether the best plan has saved tensors of layers on the host."""
        return self.plan is not None and "offload" in self.plan.assignment.recompute.values()

    def may_improve(self, plan: StepPlan) -> bool:
        """Return whether a plan may be the best, by its time alone: its memory takes longer to price."""
        return self.plan is None or self.setting.least_seconds(self.setting.whole_plan(plan)) < self.seconds

    def breaks(self, error: LayoutError) -> None:
        """Note that the last plan is none that can be run under the layout."""
        self.broken, self.is_broken = error, True

    def can_run(self, plan: StepPlan) -> bool:
        """Return whether steps lead between all shardings of a plan, and it keeps the contracts of the layout."""
        try:
            inserted_reshards(self.setting.graph, plan.assignment, plan.options.outputs, plan.options.local_inputs)
        except NoSteps as error:
            self.breaks(without_steps(error))
            return False
        return self.keeps_contracts(plan)

    def keeps_contracts(self, plan: StepPlan) -> bool:
        """Return whether a plan keeps the contracts of the layout; if not, `broken` names the broken one."""
        layout = self.bound_layout.given
        if not any(isinstance(statement, Contract) for statement in layout):
            return True
        sent = inserted_reshards(self.setting.graph, plan.assignment, plan.options.outputs, plan.options.local_inputs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AutoparWarning)  # whoever takes the plan is warned
            try:
                check_contracts(layout, self.setting.graph, plan.assignment, sent)
            except LayoutError as error:
                self.breaks(error)
                return False
        return True

    def tell(self, stage: str, bound: float) -> None:
        if self.progress is not None:
            self.progress(Progress(stage, time.monotonic() - self.began, self.seconds, bound))


def without_steps(error: NoSteps) -> LayoutError:
    """Return the error for a layout under which every plan has a reshard without steps."""
    fix = "leave more open: the dims of the tokens, or those of the parameters of experts"
    return layout_error("E5", f"rows of experts are exchanged whole, for whole groups alone; {error}", fix)


# Plans of a mesh with joined axes whose choices the whole mesh takes.
MOST_FOLLOWED = 2
# Recompute modes that save more than to recompute whole layers.
LESS_RECOMPUTED: tuple[Recompute, ...] = ("none", "selective")
# Fraction of the time for the search without a memory limit.
FREE_SHARE = 0.5


@dataclass(frozen=True)
class SearchPhases:
    """Mesh to search, perhaps with axes joined, and the incumbent of its plans."""

    setting: PlanningProblem
    bound_layout: BoundLayout
    incumbent: Incumbent
    tables: CostTables
    deadline: float
    # No search begins after this time, except `until_one_fits`.
    gives_up: float = np.inf
    until_one_fits: bool = True
    ways: AxisRoles | None = None
    joined: JoinedAxes | None = None
    # Origin of the plans that this search offers.
    origin: str = "search"
    # All plans offered by searches with joined axes, on the mesh with separate axes.
    spread: list[tuple[StepPlan, Costs]] = field(default_factory=list, init=False)

    @property
    def layers(self) -> list[str]:
        """Layers whose recomputation is open."""
        every = tuple(self.setting.graph.ops_of_layers) if self.setting.trains else ()
        return [path for path in every if path not in self.bound_layout.recompute]

    @property
    def least_bytes(self) -> float:
        """Lower bound on a device's memory if only fixed layers are recomputed."""
        graph = self.setting.graph
        regions = recompute_regions(graph, self.bound_layout.recompute)
        left = recomputed_ops(graph, regions).union(offloaded(regions))
        return self.setting.kept.least_bytes(graph, left) / self.setting.ranks

    @property
    def stored_bytes(self) -> float:
        """Lower bound on a device's memory: parameters and the state of the optimizer, in equal shares."""
        setting, total = self.setting, 0.0
        states = 0 if setting.options.offload_states else optimizer_of(setting.options.optimizer).states
        precision = setting.options.precision
        for one in setting.graph.parameters:
            trained = one.requires_grad and setting.trains
            state = precision.state(one.dtype).itemsize * states if trained else 0
            total += prod(one.shape) * (one.stored_dtype(precision).itemsize + state)
        return total / setting.ranks

    @property
    def ends(self) -> float:
        """Time after which no model is built."""
        if self.incumbent.cannot_fit:
            return min(self.gives_up, self.deadline)
        return np.inf if self.until_one_fits and self.incumbent.plan is None else self.gives_up

    def model(
        self,
        is_limited: bool = False,
        recompute: Mapping[str, Recompute] | None = None,
    ) -> Model:
        """Build the model under the layout's statements about layers and its contracts.

        Under a memory limit regather and recomputation are open, unless they are fixed here.
        """
        again = {**(recompute or {}), **self.bound_layout.recompute}
        is_open = self.layers if is_limited and recompute is None else ()
        made = build(self.setting, self.bound_layout, self.tables, is_limited, again, self.ways, is_open, self.ends)
        return forbid_broken(made, self.bound_layout, self.tables)

    def offer(self, plan: StepPlan) -> Costs:
        if self.joined is None:
            return self.incumbent.offer(self.origin, plan)
        plan = self.joined.spread(plan)
        costs = self.incumbent.offer(self.origin, plan)
        self.spread.append((plan, costs))
        return costs

    def search(self, model: Model, limit_gib: float, deadline: float, hint: Floats | None = None) -> LagrangianSearch:
        """Return a search that offers every plan to the incumbent."""

        buckets = JoinedBuckets(model)

        def report(chosen: Sequence[int]) -> tuple[float, float]:
            try:
                costs = self.offer(plan_of(model, buckets.joined(chosen)))
            except NoSteps as error:
                self.incumbent.breaks(without_steps(error))
                return np.inf, peak_gib(model.sums(chosen))
            return (np.inf if self.incumbent.is_broken else costs.step_seconds), costs.limited_bytes / 2**30

        search = LagrangianSearch(model, report, deadline, limit_gib, hint=hint, beside=buckets.gathered_again)
        search.best = self.incumbent.seconds
        return search

    def searched(self, model: Model, limit_gib: float, deadline: float, hint: Floats | None = None) -> LagrangianSearch:
        search = self.search(model, limit_gib, deadline, hint)
        if search.is_limited and least_memory(search).peak_gib > limit_gib and self.incumbent.plan is None:
            search.cannot_fit = not may_fit(search, limit_gib)
            # Other joins of axes may fit.
            self.incumbent.cannot_fit |= search.cannot_fit and self.joined is None
            search_least_memory(self, is_hopeless=search.cannot_fit)
            if self.incumbent.plan is None:
                search.hint = None  # the least memory is sought, not the least time
                lower_memory(search, limit_gib, self.incumbent.least_bytes / 2**30)
            if self.incumbent.plan is None:
                search.is_short = True
                count_once(search)
                return search
            search.best = self.incumbent.seconds
        search.run()
        if self.joined is None:  # of joined axes, only the choices are followed
            splice_plans(search)
        search.end()
        if self.joined is None and search.is_wide:
            search.widen()
            splice_plans(search)
        count_once(search)
        if self.joined is None and search.refine():
            splice_plans(search)
            count_once(search)
        return search

    def search_model(self, limit_gib: float, deadline: float, hint: Floats | None = None) -> LagrangianSearch:
        """Search the model of a limit on memory, or that without one."""
        return self.searched(self.model(is_limited=bool(np.isfinite(limit_gib))), limit_gib, deadline, hint)

    def lower_memory(self) -> None:
        """Lower the memory of plans until one fits."""
        search = self.search(self.model(is_limited=True), self.incumbent.limit / 2**30, self.deadline)
        least_memory(search)
        lower_memory(search, search.limit_gib, self.incumbent.least_bytes / 2**30)


@dataclass(frozen=True)
class SearchResult:
    """Last search, None if there was no time for one or no search, and the bound on all plans."""

    search: LagrangianSearch | None
    bound: float
    # Only a part of the choices was searched.
    is_part: bool = False
    # A search that was due did not begin in time.
    is_cut: bool = False
    bound_by: str = "search"
    # The last model that was solved without a search.
    model: Model | None = None


# Gap of a plan that offloads layers, above which plans without are searched too.
OFFLOAD_GAP = 0.02


def settle(work: SearchPhases, beat_seconds: float = np.inf) -> SearchResult:
    """Search without a limit if a plan without recomputation can fit; search with the limit if its best plan does not.

    Each kind of search begins however little time is left, until one plan fits, unless that is left to others. Stop if
    no plan is below `beat_seconds`.
    """
    incumbent, search, bound, hint = work.incumbent, None, 0.0, None
    try:
        if work.least_bytes <= incumbent.limit:
            now = time.monotonic()
            search = work.search_model(np.inf, now + (work.deadline - now) * FREE_SHARE)
            bound, hint = search.bound, search.hinge_multipliers()
        if not (search is not None and incumbent.is_free) and bound < beat_seconds:
            search = work.search_model(incumbent.limit / 2**30, work.deadline, hint)
            if incumbent.plan is None and hint is not None and not search.is_short:
                search = work.search_model(incumbent.limit / 2**30, work.deadline)
            bound = max(bound, search.bound)
            # The model does not limit the memory of the host, and the copies of all layers share a link: multipliers
            # choose too many. Bound and proof are those of the search with all modes.
            is_far = incumbent.offloads and relative_gap(incumbent.seconds, bound) > OFFLOAD_GAP
            if incumbent.exceeds_host or is_far:
                without_offload(work).search_model(incumbent.limit / 2**30, work.deadline)
    except OutOfTime:
        return SearchResult(search, bound, is_cut=True)
    return SearchResult(search, bound)


def without_offload(work: SearchPhases) -> SearchPhases:
    """Return the same search in which no layer is offloaded, unless the layout says so."""
    setting = replace(work.setting, may_offload=False)
    return replace(work, setting=setting, tables=CostTables(setting))


def search_least_memory(work: SearchPhases, only_one: bool = False, is_hopeless: bool = False) -> None:
    """Search the plans of least memory, with all layers recomputed in one way; offer them to the incumbent.

    `only_one`: stop when a plan fits. `is_hopeless`: stop with the time, as none will. Beyond the time no mode is tried
    that recomputes less than another one: it saves more. No mode is tried twice.
    """
    incumbent, modes = work.incumbent, work.setting.modes if work.layers else STATES[:1]
    for mode in reversed(modes):
        if only_one and incumbent.plan is not None:
            return
        is_less = is_hopeless or (mode in LESS_RECOMPUTED and mode != modes[-1])
        if is_less and np.isfinite(incumbent.least_bytes) and time.monotonic() > work.deadline:
            return
        if (work.setting, mode) in incumbent.tried:
            continue
        model = work.model(is_limited=True, recompute=dict.fromkeys(work.layers, mode))
        search = work.search(model, incumbent.limit / 2**30, np.inf)
        least_memory(search)
        search.end()
        incumbent.tried.add((work.setting, mode))


# Choices of all ops at most, of a graph that is searched whole on a mesh of many axes.
MOST_CHOICES = 600


def is_searched_whole(work: SearchPhases) -> bool:
    """Return whether the search covers all choices: on few axes, or of a small graph."""
    setting = work.setting
    if len(setting.used) <= MOST_AXES:
        return True
    if len(setting.graph.nodes) > SMALL:
        return False
    every = (options_of(setting, work.bound_layout, node) for node in setting.graph.nodes)
    return all(total <= MOST_CHOICES for total in accumulate(map(len, every)))


def promising_choices(work: SearchPhases) -> AxisRoles:
    """Return the choices of the best plans of a mesh of many axes with neighbouring axes joined."""
    setting, incumbent = work.setting, work.incumbent
    plans = [] if incumbent.plan is None else [incumbent.plan]
    if not work.bound_layout.is_empty:  # what is found does not heed them, and so is not for this race
        nothing = BoundLayout(setting.graph, Layout(()), setting.axes, constrained=False)
        incumbent = Incumbent(setting, incumbent.limit, incumbent.began, None, nothing)
    meshes = list(joined_meshes(setting))
    is_hopeless = True
    for number, (joined, merged) in enumerate(meshes):
        now = time.monotonic()
        if plans and now > (work.deadline if is_hopeless else work.ends):
            break
        until = now + (work.deadline - now) / (len(meshes) - number + 1)
        free = BoundLayout(merged.graph, Layout(()), merged.axes, constrained=False)
        coarse = SearchPhases(
            merged, free, incumbent, CostTables(merged), until, work.gives_up, work.until_one_fits, joined=joined
        )
        search = settle(coarse).search
        is_hopeless &= search is not None and search.cannot_fit
        best = sorted(coarse.spread, key=lambda one: (one[1].limited_bytes > incumbent.limit, one[1].step_seconds))
        plans += [plan for plan, _ in best[:MOST_FOLLOWED]]
    work.incumbent.cannot_fit |= is_hopeless
    if not plans:
        raise OutOfTime
    return ways_of(setting, plans)
