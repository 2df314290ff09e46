"""The least of the model's objective within its limits: prices from outside, exact elimination inside.

The objective has hinges, each of which is the most over λ in [0, 1] of λ times a sum; each limit on memory has a price
μ ≥ 0. At fixed prices a sum over variables and factors is left, whose least elimination finds: a lower bound on the
seconds of every plan. The sums of what it found bound the next prices from above, for all prices at once (a cutting
plane); the best prices under all planes are the next to try. What is found on the way are candidates, told to `report`.

Memory is counted only roughly here. `report` says what a candidate really takes, and the limits give way by the
difference. Of two candidates, one that fits and one that is faster, mixtures are tried: one up to some place of the
graph, the other from there on.

Variables that too many others depend on are cut (`search.folded`): the bound lets each table choose for itself, and the
candidates fix them at the states that fit best, over and over until none changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autopar.planning.closing import close
from autopar.planning.listed import Listed, listed
from autopar.planning.model import Model
from autopar.planning.totals import FORBIDDEN_SECONDS, MOMENTS, Hinges, Sum, peak_gib
from autopar.planning.weighed import Elimination, mixtures
from autopar.search.problem import Floats

__all__ = ["Found", "Search"]

MOST_ROUNDS = 25
SCANNED = range(-8, 3)
"""Powers of two of the prices of memory that are tried first, of seconds per GiB of the fastest plan."""
HOPELESS = 1.002
"""Candidates that are believed to be so much slower than the best are not priced."""
SMALL = 24
"""Variables of a model that is small enough to try whatever could still be better."""
MOST_CLOSED = 1000
MOST_LISTED = 2000
"""Candidates that are priced to prove that nothing is better; of those that can be listed, that is quick."""
FIRST_LISTED = 125
PRICES_LISTED = (0, 3, 6)
"""Powers of two of prices of memory, of seconds per byte of the fastest plan that takes all there is."""
LESS = 1e-3
"""What is tried is this part less than the least memory that was found."""
HIGHEST_PRICE = 1e3
"""Seconds per GiB and second of the step: no memory is worth more."""


@dataclass(frozen=True)
class Found:
    """An assignment, its sums, and what `evaluate` says of its plan."""

    chosen: list[int]
    sums: Floats
    seconds: float
    peak_gib: float

    @property
    def missed_gib(self) -> float:
        """What the peak is above what the sums say."""
        return self.peak_gib - peak_gib(self.sums)


@dataclass
class Search:
    """One model; `report` is told of every assignment and answers the seconds and the peak (GiB) of its plan."""

    model: Model
    report: Callable[[Sequence[int]], tuple[float, float]]
    deadline: float
    limit_gib: float = np.inf
    gap: float = 1e-4
    best: float = np.inf
    planes: list[Floats] = field(default_factory=list)
    answers: list[tuple[float, Floats]] = field(default_factory=list)
    """What was proved: at these prices the least is so much, the limits not taken off."""
    proved: float = 0.0
    found: dict[tuple[int, ...], Found] = field(default_factory=dict)
    passed: list[Found] = field(default_factory=list)
    """What does not fit and was not priced: its seconds and memory are those of its sums."""
    hint: Floats | None = None
    """Prices of the hinges that were good without limits."""
    is_listed: bool = False
    """Whether `proved` is of all assignments, and so the best that can be said."""

    def __post_init__(self) -> None:
        self.hinges = Hinges.of(self.model.setting)
        self.elimination = Elimination.of(self.model)
        self.count = len(self.hinges.offsets)

    @property
    def is_limited(self) -> bool:
        return bool(np.isfinite(self.limit_gib))

    @property
    def bound(self) -> float:
        """The best that is proved; of memory, no plan is taken to need less than is counted, or than any did."""
        return self._bound_at(self.limit_gib - min(0.0, self._least_missed))

    def _bound_at(self, limit_gib: float) -> float:
        return max([self.proved, *(self._answer_at(answer, limit_gib) for answer in self.answers)])

    def _answer_at(self, answer: tuple[float, Floats], limit_gib: float) -> float:
        value, prices = answer
        return value - (limit_gib if self.is_limited else 0.0) * float(prices[self.count :].sum())

    @property
    def aim_gib(self) -> float:
        """What may be counted: what is known to be missed of the plan closest to the limit leaves so much."""
        if not self.is_limited:
            return np.inf
        closest = min(self.found.values(), key=lambda one: abs(one.peak_gib - self.limit_gib), default=None)
        missed = 0.0 if closest is None else closest.missed_gib
        return self.limit_gib - missed

    @property
    def is_closed(self) -> bool:
        return bool(np.isfinite(self.best)) and self.best - self.bound <= self.gap * self.best

    def run(self) -> None:
        """Improve prices until the gap is closed, nothing moves, or the time is up."""
        if self.is_limited:
            self._scan()
        self._improve()

    def _scan(self) -> None:
        """Plans that take less and less memory, until one fits: the same whatever the limit is, so that more room makes
        no plan worse."""
        hinges = np.ones(self.count) if self.hint is None else self.hint
        weights, _ = self.hinges.weights(hinges)
        fastest = self.elimination.candidate(weights)
        sums = self.model.sums(fastest)
        scale = self.hinges.seconds(sums) / max(peak_gib(sums), 1e-9)
        before: Floats | None = None
        for exponent in SCANNED:
            if time.monotonic() > self.deadline and np.isfinite(self.best):
                return
            at = weights + scale * 2.0**exponent * (np.array([1.0, 0.25]) @ MOMENTS)
            _, sums = self.elimination.least(at)
            self.planes.append(sums)
            if peak_gib(sums) + min(0.0, self._least_missed) > self.limit_gib:
                before = at
                continue
            if before is not None:
                self._pass_by(before)
                before = None
            chosen = self.elimination.candidate(at)
            self.planes.append(self.model.sums(chosen))
            if self.try_out(chosen).peak_gib <= self.limit_gib or time.monotonic() > self.deadline:
                return

    def _pass_by(self, weights: Floats) -> None:
        """What is fast and takes too much: with others it may make something that fits."""
        chosen = self.elimination.candidate(weights)
        sums = self.model.sums(chosen)
        self.passed.append(Found(chosen, sums, self.hinges.seconds(sums), peak_gib(sums) + self._least_missed))

    def _improve(self) -> None:
        prices = np.zeros(self.count + len(MOMENTS))
        if len(self.planes) > 1:
            _, prices = self._master()
        for _ in range(MOST_ROUNDS):
            self._round(prices)
            if self.is_closed or self.bound >= FORBIDDEN_SECONDS or time.monotonic() > self.deadline:
                return
            upper, prices = self._master()
            if upper - self._bound_at(self.aim_gib) <= 0.1 * self.gap * abs(upper):
                return

    # -- one round

    def _round(self, prices: Floats) -> None:
        weights, constant = self.hinges.weights(prices[: self.count])
        weights = weights + prices[self.count :] @ MOMENTS
        value, sums = self.elimination.least(weights)
        self.answers.append((value + constant, prices))
        self.planes.append(sums)
        self.try_out(self.elimination.candidate(weights))

    def try_out(self, chosen: list[int], hopeless: bool = True) -> Found:
        """Price a candidate; heed what it says about memory."""
        key = tuple(chosen)
        known = self.found.get(key)
        if known is None:
            sums = self.model.sums(chosen)
            guess = self.hinges.seconds(sums)
            if hopeless and not self.is_limited and guess > HOPELESS * self.best:
                return Found(chosen, sums, guess, 0.0)
            seconds, peak = self.report(chosen)
            known = self.found[key] = Found(chosen, sums, seconds, peak)
            if peak <= self.limit_gib:
                self.best = min(self.best, seconds)
        return known

    def _master(self) -> tuple[float, Floats]:
        """The prices at which the least plane is highest."""
        from ortools.linear_solver import pywraplp  # late: it takes a while to import

        solver: Any = pywraplp.Solver.CreateSolver("GLOP")
        prices = [solver.NumVar(0.0, 1.0, "") for _ in range(self.count)]
        scale = max(self.best if np.isfinite(self.best) else 1.0, 1e-9)
        highest = HIGHEST_PRICE * scale if self.is_limited else 0.0
        prices += [solver.NumVar(0.0, highest, "") for _ in MOMENTS]
        least = solver.NumVar(-solver.infinity(), solver.infinity(), "")
        for sums in self.planes:
            slopes = [*(self.hinges.slopes @ sums + self.hinges.offsets), *self._excess(sums)]
            base = float(self.hinges.base @ sums + self.hinges.constant)
            terms = (float(slope) / scale * price for slope, price in zip(slopes, prices, strict=True))
            solver.Add(least <= base / scale + sum(terms))
        solver.Maximize(least)
        status = solver.Solve()
        assert status == pywraplp.Solver.OPTIMAL, status
        return least.solution_value() * scale, np.array([price.solution_value() for price in prices])

    def _excess(self, sums: Floats) -> Floats:
        if not self.is_limited:
            return np.zeros(len(MOMENTS))
        return np.asarray(MOMENTS @ sums - self.aim_gib)

    def hinge_prices(self) -> Floats:
        """Those of the best bound without limits."""
        free = [(value, prices) for value, prices in self.answers if not prices[self.count :].any()]
        return max(free, key=lambda answer: answer[0])[1][: self.count] if free else np.zeros(self.count)

    @property
    def is_small(self) -> bool:
        decided = sum(variable.kind != "recompute" for variable in self.model.variables)
        return decided <= SMALL and not self.elimination.cut

    def close(self, most: int = MOST_CLOSED) -> None:
        """Of small models, the proof: what could still be better is tried.

        Where memory is limited, first what takes least of it, until something fits, then by what time and memory are
        worth together: that finds what is good and fits. Then by the time alone, which proves that nothing is better.
        What is counted of memory proves nothing: what is missed of it may be anything in a small model.
        """
        if not self.is_small:
            return
        everything = listed(self.model, self.hinges)
        if everything is not None:
            self._close_listed(everything)
            return
        if self.best <= self.bound:
            return
        _, prices = max(self.answers, key=lambda answer: self._answer_at(answer, self.aim_gib), default=(0.0, None))
        if self.is_limited:
            if not np.isfinite(self.best):
                self._close_for_memory(most // 4)
            if prices is not None and prices[self.count :].any():
                self._close(prices, most // 4)
        self.proved = max(self.proved, self._close(np.append(self.hinge_prices(), [0.0] * len(MOMENTS)), most))

    def _close_listed(self, everything: Listed) -> None:
        """The same, where all assignments can be listed; at some prices of memory, as none is known to be right."""
        seconds = everything.seconds
        gib = np.where(seconds < FORBIDDEN_SECONDS, everything.gib, np.inf)

        def best() -> float:
            return self.best

        def tried(keys: Floats, most: int, below: Callable[[], float] = best) -> float:
            for number, (key, chosen) in enumerate(everything.in_order(keys)):
                if number == most or key >= min(below(), FORBIDDEN_SECONDS) or time.monotonic() > self.deadline:
                    return min(key, below())
                self.try_out(chosen, hopeless=False)
            return below()

        if self.is_limited and tried(seconds, FIRST_LISTED) < best():
            if not np.isfinite(best()):
                tried(gib, 2 * FIRST_LISTED, lambda: -np.inf if np.isfinite(best()) else np.inf)
            scale = float(seconds.min()) / max(self.limit_gib, 1e-12)
            for exponent in PRICES_LISTED:
                tried(seconds + scale * 2.0**exponent * gib, FIRST_LISTED, lambda: np.inf)
        self.proved = tried(seconds, MOST_LISTED)
        self.is_listed = True

    def _close(self, prices: Floats, most: int) -> float:
        """In the order of what is bounded at some prices; a bound on the seconds, where no price of memory is."""
        weights, constant = self.hinges.weights(prices[: self.count])
        weights = weights + prices[self.count :] @ MOMENTS
        of_memory = float(prices[self.count :].sum())

        def below() -> float:
            room = of_memory * (self.limit_gib - self._least_missed) if of_memory else 0.0
            return self.best - constant + room

        def price(chosen: list[int]) -> float:
            self.try_out(chosen, hopeless=False)
            return below()

        return close(self.elimination, weights, below(), price, most, self.deadline) + constant

    def _close_for_memory(self, most: int) -> None:
        """In the order of the memory that is counted, until something fits."""
        weights = MOMENTS.mean(axis=0)
        weights[Sum.FORBIDDEN] = FORBIDDEN_SECONDS

        def below() -> float:
            least = min((found.peak_gib for found in self.found.values()), default=np.inf)
            return -np.inf if least <= self.limit_gib else least - self._least_missed

        def price(chosen: list[int]) -> float:
            self.try_out(chosen, hopeless=False)
            return below()

        close(self.elimination, weights, below(), price, most, self.deadline)

    @property
    def _least_missed(self) -> float:
        """What is missed of memory, of the plan that was priced by which least is."""
        return min((found.missed_gib for found in self.found.values()), default=0.0)

    # -- memory

    def least_memory(self) -> Found:
        """The plan that takes least, of a few weights of the moments of a step."""
        tried = []
        for kept in (1.0, 0.5, 0.0):
            weights = 1e-9 * self.hinges.base + np.array([kept, 1 - kept]) @ MOMENTS
            weights[Sum.FORBIDDEN] = FORBIDDEN_SECONDS
            chosen = self.elimination.candidate(weights)
            self.planes.append(self.model.sums(chosen))
            tried.append(self.try_out(chosen))
            if tried[-1].peak_gib <= self.limit_gib:
                break
        return min(tried, key=lambda one: one.peak_gib)

    def lessen(self, limit_gib: float) -> None:
        """Where nothing fits yet: as if the limit were just below the least that was found, over and over."""
        while time.monotonic() < self.deadline:
            least = min((one.peak_gib for one in self.found.values()), default=np.inf)
            if least <= limit_gib or not np.isfinite(least):
                break
            self.limit_gib = least * (1 - LESS)
            self.best = np.inf
            self.run()
            self.mix()
            if min(one.peak_gib for one in self.found.values()) > self.limit_gib:
                break
        self.limit_gib = limit_gib

    def mix(self) -> None:
        """Mixtures of the fastest plan that fits with others: with those that are faster and do not fit, or with those
        that send less beside the computing, or more."""
        fits = [one for one in self.found.values() if one.peak_gib <= self.limit_gib]
        if not fits:
            return
        best = min(fits, key=lambda one: one.seconds)
        others = [*(one for one in self.found.values() if one is not best), *self.passed]
        passes = [one for one in others if one.peak_gib > self.limit_gib and one.seconds < self.best]
        rest = sorted(others, key=lambda one: one.seconds)
        for other in [*sorted(passes, key=lambda one: one.peak_gib)[:MOST_MIXED], *rest[:MOST_MIXED]]:
            if not self.is_closed and time.monotonic() < self.deadline:
                self._mix(best, other)

    def _mix(self, one: Found, other: Found) -> None:
        missed = max(one.missed_gib, other.missed_gib) if self.is_limited else 0.0
        made = mixtures(self.model, one.chosen, other.chosen)
        worth = []
        for chosen, sums in made:
            seconds = self.hinges.seconds(sums)
            if peak_gib(sums) + missed <= self.limit_gib and seconds < self.best:
                worth.append((seconds, chosen))
        for seconds, chosen in sorted(worth, key=lambda pair: pair[0])[:MOST_MIXED]:
            if seconds < self.best and time.monotonic() < self.deadline:
                self.try_out(chosen)


MOST_MIXED = 3
