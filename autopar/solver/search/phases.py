"""The searches of one mesh, one after the other: without a limit on memory, and with it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.cost.evaluate import Costs
from autopar.sharding.assignment import StepPlan
from autopar.sharding.bound_layout import BoundLayout
from autopar.sharding.layout.language import Layout
from autopar.sharding.options import Recompute
from autopar.sharding.recompute import recompute_regions, recomputed_ops
from autopar.solver.arrays import Floats
from autopar.solver.decode import plan_of
from autopar.solver.infeasible.errors import OutOfTime
from autopar.solver.model.build import build
from autopar.solver.model.cost_tables import CostTables
from autopar.solver.model.guard_factors import forbid_broken
from autopar.solver.model.model import Model
from autopar.solver.model.objective import HOST
from autopar.solver.model.recompute_variables import STATES, layers_of
from autopar.solver.search.incumbent import Incumbent
from autopar.solver.search.joined_axes import AxisRoles, JoinedAxes, joined_meshes, ways_of
from autopar.solver.search.lagrangian import LagrangianSearch
from autopar.solver.setting import PlanningProblem

__all__ = ["SearchPhases", "SearchResult", "least_memory", "settle", "worthwhile"]

MOST_FOLLOWED = 2
"""Plans of a mesh with joined axes whose choices are followed."""
FREE_SHARE = 0.5
"""Of the time, for the search that pays no heed to memory."""


@dataclass(frozen=True)
class SearchPhases:
    """A mesh to search, perhaps with axes joined, and the race that its plans run in."""

    setting: PlanningProblem
    bound_layout: BoundLayout
    incumbent: Incumbent
    tables: CostTables
    deadline: float
    gives_up: float = np.inf
    """When no search is begun any more, but for one that is to go on `until_one_fits`."""
    until_one_fits: bool = True
    ways: AxisRoles | None = None
    joined: JoinedAxes | None = None
    spread: list[tuple[StepPlan, Costs]] = field(default_factory=list, init=False)
    """Of joined axes: all plans that were offered, on the mesh as it is."""

    @property
    def layers(self) -> list[str]:
        """The layers of which it is open whether they are computed again."""
        every = layers_of(self.setting.graph) if self.setting.trains else ()
        return [path for path in every if path not in self.bound_layout.recompute]

    @property
    def least_bytes(self) -> float:
        """What a device holds at least, if nothing is computed again but what is settled."""
        graph = self.setting.graph
        again = recomputed_ops(graph, recompute_regions(graph, self.bound_layout.recompute))
        return self.setting.kept.least_bytes(graph, again) / self.setting.ranks

    @property
    def ends(self) -> float:
        """When it is too late to make a model."""
        return np.inf if self.until_one_fits and self.incumbent.plan is None else self.gives_up

    def model(
        self,
        is_limited: bool = False,
        recompute: Mapping[str, Recompute] | None = None,
        lasting: bool = False,
    ) -> Model:
        """With what the layout says of layers, and what it promises of the whole.

        Where memory is limited, what saves it is open: what is gathered again, and what is computed again, unless it is
        said here.
        """
        again = {**(recompute or {}), **self.bound_layout.recompute}
        is_open = self.layers if is_limited and recompute is None else ()
        made = build(
            self.setting, self.bound_layout, self.tables, is_limited, again, self.ways, is_open, self.ends, lasting
        )
        return forbid_broken(made, self.bound_layout, self.tables)

    def offer(self, plan: StepPlan) -> Costs:
        if self.joined is None:
            return self.incumbent.offer("search", plan)
        plan = self.joined.spread(plan)
        costs = self.incumbent.offer("search", plan)
        self.spread.append((plan, costs))
        return costs

    def search(self, model: Model, limit_gib: float, deadline: float, hint: Floats | None = None) -> LagrangianSearch:
        """A search that tells the race of all that it finds."""

        def report(chosen: Sequence[int]) -> tuple[float, float]:
            costs = self.offer(plan_of(model, chosen))
            return (np.inf if self.incumbent.is_broken else costs.step_seconds), costs.memory.peak_bytes / 2**30

        search = LagrangianSearch(model, report, deadline, limit_gib, hint=hint)
        search.best = self.incumbent.seconds
        return search

    def searched(self, model: Model, limit_gib: float, deadline: float, hint: Floats | None = None) -> LagrangianSearch:
        search = self.search(model, limit_gib, deadline, hint)
        if search.is_limited and search.least_memory().peak_gib > limit_gib and self.incumbent.plan is None:
            least_memory(self)
            if self.incumbent.plan is None:
                search.lessen(limit_gib)
            if self.incumbent.plan is None:
                return search
            search.best = self.incumbent.seconds
        search.run()
        if self.joined is None:  # of joined axes, only the choices are followed
            search.mix()
        search.end()
        if self.joined is None and search.is_wide:
            search.widen()
            search.mix()
        return search

    def search_keep_gathered(
        self, limit_gib: float, deadline: float, hint: Floats | None = None, lasting: bool = False
    ) -> LagrangianSearch:
        """Where the host has a price, parameters may also stay gathered until the optimizer steps.

        That saves nothing else, so it is left out of the first search; of small models it is tried in any case.
        """
        is_limited = bool(np.isfinite(limit_gib))
        if not lasting:
            search = self.searched(self.model(is_limited), limit_gib, deadline, hint)
            hint = search.prices_of_hinges()
            if hint[HOST] == 0.0 and not search.is_small:
                return search
        return self.searched(self.model(is_limited, lasting=True), limit_gib, deadline, hint)

    def lessen(self) -> None:
        """Less and less memory, until one plan fits."""
        search = self.search(self.model(is_limited=True), self.incumbent.limit / 2**30, self.deadline)
        search.least_memory()
        search.lessen(search.limit_gib)


@dataclass(frozen=True)
class SearchResult:
    """The last search, if there was time for one, and what is proved of all plans."""

    search: LagrangianSearch | None
    bound: float
    is_part: bool = False
    """Whether not all choices were searched."""
    is_cut: bool = False
    """Whether there was no time to begin a search that was due."""


def settle(work: SearchPhases, beat_seconds: float = np.inf) -> SearchResult:
    """Search without a limit first, if anything can fit that saves no memory; where the best does not, with it.

    However little time there is, each kind of search is begun until one plan fits, unless that is left to others. It
    ends where no plan is below `beat_seconds`.
    """
    incumbent, search, bound, hint = work.incumbent, None, 0.0, None
    try:
        if work.least_bytes <= incumbent.limit:
            now = time.monotonic()
            search = work.search_keep_gathered(np.inf, now + (work.deadline - now) * FREE_SHARE)
            bound, hint = search.bound, search.prices_of_hinges()
        is_free = incumbent.plan is not None and incumbent.seconds <= incumbent.passed_seconds
        if not is_free and bound < beat_seconds:
            lasting = hint is not None and bool(hint[HOST] > 0)
            search = work.search_keep_gathered(incumbent.limit / 2**30, work.deadline, hint, lasting)
            if incumbent.plan is None and hint is not None:  # as the least that would do is found
                search = work.search_keep_gathered(incumbent.limit / 2**30, work.deadline)
            bound = max(bound, search.bound)
    except OutOfTime:
        return SearchResult(search, bound, is_cut=True)
    return SearchResult(search, bound)


def least_memory(work: SearchPhases, only_one: bool = False) -> None:
    """Only what takes least of it, with all layers computed again in one way: the race is told.

    `only_one`: until one plan fits.
    """
    for mode in reversed(STATES if work.layers else STATES[:1]):
        if only_one and work.incumbent.plan is not None:
            return
        model = work.model(is_limited=True, recompute=dict.fromkeys(work.layers, mode))
        work.search(model, work.incumbent.limit / 2**30, np.inf).least_memory()


def worthwhile(work: SearchPhases) -> AxisRoles:
    """Of a mesh with many axes, the choices of the best plans with neighbouring axes as one."""
    setting, incumbent = work.setting, work.incumbent
    plans = [] if incumbent.plan is None else [incumbent.plan]
    if not work.bound_layout.is_empty:  # what is found does not heed them, and so is not for this race
        nothing = BoundLayout(setting.graph, Layout(()), setting.axes, constrained=False)
        incumbent = Incumbent(setting, incumbent.limit, incumbent.began, None, nothing)
    meshes = list(joined_meshes(setting))
    for number, (joined, merged) in enumerate(meshes):
        now = time.monotonic()
        if plans and now > work.ends:
            break
        until = now + (work.deadline - now) / (len(meshes) - number + 1)
        free = BoundLayout(merged.graph, Layout(()), merged.axes, constrained=False)
        coarse = SearchPhases(
            merged, free, incumbent, CostTables(merged), until, work.gives_up, work.until_one_fits, joined=joined
        )
        settle(coarse)
        best = sorted(coarse.spread, key=lambda one: (one[1].memory.peak_bytes > incumbent.limit, one[1].step_seconds))
        plans += [plan for plan, _ in best[:MOST_FOLLOWED]]
    if not plans:
        raise OutOfTime
    return ways_of(setting, plans)
