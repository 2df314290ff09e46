"""The searches of one mesh, one after the other: without a limit, with it, and with layers computed again."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from autopar.cost.costs import Costs
from autopar.decided import Plan
from autopar.layout.holds import Recompute
from autopar.layout.language import Layout
from autopar.planning.coarse import Joined, Ways, joined_meshes, ways_of
from autopar.planning.decode import plan_of
from autopar.planning.demands import Demands
from autopar.planning.model import Model, build
from autopar.planning.promises import promised
from autopar.planning.race import Race
from autopar.planning.recomputing import MODES, layers_of, thinned
from autopar.planning.routes import Routes
from autopar.planning.search import Search
from autopar.planning.setting import Setting
from autopar.planning.tables import Tables
from autopar.search.problem import Floats

__all__ = ["Ended", "Work", "least_memory", "settle", "small_recomputed", "worthwhile"]

MOST_FOLLOWED = 2
"""Plans of a mesh with joined axes whose choices are followed."""
FREE_SHARE = 0.5
"""Of the time, for the search that pays no heed to memory."""
MOST_WAYS = 27
"""To compute layers again, in a model that is small enough to try them all: three layers, each in three ways."""


@dataclass(frozen=True)
class Work:
    """A mesh to search, perhaps with axes joined, and the race that its plans run in."""

    setting: Setting
    demands: Demands
    race: Race
    deadline: float
    ways: Ways | None = None
    joined: Joined | None = None
    tables: Tables = field(init=False)
    spread: list[tuple[Plan, Costs]] = field(default_factory=list, init=False)
    """Of joined axes: all plans that were offered, on the mesh as it is."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tables", Tables(self.setting, Routes(self.setting.axes)))

    @property
    def layers(self) -> list[str]:
        """The layers of which it is open whether they are computed again."""
        return [path for path in layers_of(self.setting.graph) if path not in self.demands.recompute]

    def model(self, regather: bool = False, recompute: Mapping[str, Recompute] | None = None) -> Model:
        """With what the layout says of layers, and what it promises of the whole."""
        again = {**(recompute or {}), **self.demands.recompute}
        made = build(self.setting, self.demands, self.tables, regather, again, self.ways)
        return promised(made, self.demands, self.tables)

    def offer(self, plan: Plan) -> Costs:
        if self.joined is None:
            return self.race.offer("search", plan)
        plan = self.joined.spread(plan)
        costs = self.race.offer("search", plan)
        self.spread.append((plan, costs))
        return costs

    def search(self, model: Model, limit_gib: float, deadline: float, hint: Floats | None = None) -> Search:
        """A search that tells the race of all that it finds."""

        def report(chosen: Sequence[int]) -> tuple[float, float]:
            costs = self.offer(plan_of(model, chosen))
            return (np.inf if self.race.is_broken else costs.step_seconds), costs.memory.peak_bytes / 2**30

        search = Search(model, report, deadline, limit_gib, hint=hint)
        search.best = self.race.seconds
        return search

    def searched(self, model: Model, limit_gib: float, deadline: float, hint: Floats | None = None) -> Search:
        search = self.search(model, limit_gib, deadline, hint)
        if search.is_limited and search.least_memory().peak_gib > limit_gib and self.race.plan is None:
            return search
        search.run()
        search.mix()
        return search


@dataclass(frozen=True)
class Ended:
    """The last search, and what is proved of all plans."""

    search: Search
    bound: float


def settle(work: Work) -> Ended:
    """Search without a limit first; where the best does not fit, with it, and with layers computed again.

    However little time there is, each kind of search is begun until one plan fits.
    """
    race = work.race
    now = time.monotonic()
    search = work.searched(work.model(), np.inf, now + (work.deadline - now) * FREE_SHARE)
    bound = search.bound
    if race.plan is None or race.passed_seconds < race.seconds:
        hint = search.hinge_prices()
        search = work.searched(work.model(regather=True), race.limit / 2**30, work.deadline, hint)
        if not (layers_of(work.setting.graph) and work.setting.trains):
            bound = search.bound
        elif work.joined is None:
            _recomputed(work, hint)
    return Ended(search, bound)


def _recomputed(work: Work, hint: Floats) -> None:
    """Plans that are fast and do not fit, with layers computed again; then plans that are sought for it."""
    race, graph, said = work.race, work.setting.graph, work.demands.recompute
    for plan in [plan for plan in (race.passed, race.plan) if plan is not None]:
        for mode in MODES:
            thinned(graph, plan, mode, lambda made: race.offer("search", made), race.limit, said)
    for mode in MODES:
        if race.plan is not None and time.monotonic() > work.deadline:
            return
        model = work.model(regather=True, recompute=dict.fromkeys(layers_of(graph), mode))
        work.searched(model, race.limit / 2**30, work.deadline, hint)
        if race.plan is not None and race.plan.recompute:
            thinned(graph, race.plan, mode, lambda made: race.offer("search", made), race.limit, said)


def least_memory(work: Work) -> None:
    """Only what takes least of it: the race is told."""
    layers = work.layers if work.setting.trains else []
    for mode in ("none", *MODES) if layers else ("none",):
        model = work.model(regather=True, recompute=dict.fromkeys(layers, mode))
        work.search(model, work.race.limit / 2**30, np.inf).least_memory()


def small_recomputed(work: Work, search: Search) -> tuple[Search, ...]:
    """Searches for all ways to compute layers again, where these are few."""
    layers = work.layers if work.setting.trains else []
    if not search.is_small or not layers or (1 + len(MODES)) ** len(layers) > MOST_WAYS:
        return ()
    every = (dict(zip(layers, modes, strict=True)) for modes in product(("none", *MODES), repeat=len(layers)))
    return tuple(
        work.search(work.model(regather=True, recompute=recompute), search.limit_gib, search.deadline)
        for recompute in every
        if set(recompute.values()) != {"none"}
    )


def worthwhile(work: Work) -> Ways:
    """Of a mesh with many axes, the choices of the best plans with neighbouring axes as one."""
    setting, race = work.setting, work.race
    plans = [] if race.plan is None else [race.plan]
    if not work.demands.is_empty:  # what is found does not heed them, and so is not for this race
        nothing = Demands(setting.graph, setting.axes, Layout(()), free=True)
        race = Race(setting, race.limit, race.began, None, nothing)
    meshes = list(joined_meshes(setting))
    for number, (joined, merged) in enumerate(meshes):
        now = time.monotonic()
        until = now + (work.deadline - now) / (len(meshes) - number + 1)
        free = Demands(merged.graph, merged.axes, Layout(()), free=True)
        coarse = Work(merged, free, race, until, joined=joined)
        settle(coarse)
        best = sorted(coarse.spread, key=lambda one: (one[1].memory.peak_bytes > race.limit, one[1].step_seconds))
        plans += [plan for plan, _ in best[:MOST_FOLLOWED]]
    return ways_of(setting, plans)
