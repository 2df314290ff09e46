"""Lagrangian relaxation: multipliers outside, exact elimination inside.

The objective has hinges, each the maximum over λ in [0, 1] of λ times a sum. Each memory limit has a multiplier μ ≥ 0.
At fixed multipliers a sum over variables and factors is left. Its minimum, by elimination, is a lower bound on the
seconds of every plan. The sums of the minimum give a cutting plane, which bounds the minimum at all other multipliers
from above. The best multipliers under all planes are tried next. Assignments found on the way are candidates, passed
to `report`.

The model estimates memory. `report` returns the true peak of a candidate, and the limit moves by the difference. Of
two candidates, one that fits and one that is faster, splices are tried: one up to some place of the graph, the other
after it.

Variables that make tables too large are cut (`bucket_elimination`). In the bound each table chooses their states for
itself. Candidates fix them at the states that fit best, until none changes. If that costs much of the bound,
elimination by classes follows, with few of them cut.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product

import numpy as np

from autopar.solver import Floats, Ints
from autopar.solver.model.model import Model
from autopar.solver.model.objective import FORBIDDEN_SECONDS, MOMENTS, Hinges, peak_gib
from autopar.solver.search.cutting_planes import best_multipliers
from autopar.solver.search.elimination import Elimination, WeightedMinimum
from autopar.solver.search.reshard_shares import ReshardShares
from autopar.solver.search.splice import places_of

__all__ = ["FEW", "MANY", "Candidate", "LagrangianSearch", "by_seconds"]

MOST_ROUNDS = 25
# Rounds of elimination by classes, which takes long, and the gap up to which there are none, without a limit and with.
# They end where the next one can close no more than a little of the gap.
MOST_REFINED, CLOSE, CLOSE_IF_LIMITED, LITTLE = 8, 2e-3, 2e-2, 5e-3
# In models of at most this many variables one op matters, so candidates beside the best multipliers are priced; and
# in models of at most this many, if the gap is large.
FEW, MANY = 600, 2500
WIDE = 0.01
# Steps from the best multipliers of hinges to their least and their greatest value.
BLENDS = (0.02, 0.05, 0.1, 0.2, 0.4)
# Powers of two by which the best memory multipliers are scaled, too.
SCANNED = (-8, -6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6)
MOST_AIMS = 4
# Minima that are priced although other multipliers have a higher bound.
MOST_LOOKED = 2
# A plan of many variables estimated below this fraction of the limit is taken to fit.
SURELY_FITS = 0.8
# Relative change of memory multipliers: up for a plan that fits, down for a faster one.
NUDGED = 1e-3
# Skip evaluate() for candidates whose estimate is this factor above the incumbent.
HOPELESS = 1.002
# Minima at other multipliers that are slower by this factor are not spliced with others.
FAR = 1.5
# Largest memory multiplier, in step times per GiB.
HIGHEST_MULTIPLIER = 1e3


@dataclass(frozen=True)
class Candidate:
    """Assignment, its sums, and the seconds and peak of its plan by `evaluate`."""

    chosen: list[int]
    sums: Floats
    seconds: float
    peak_gib: float

    @property
    def error_gib(self) -> float:
        """Peak memory by `evaluate` minus the model's estimate, in GiB."""
        return self.peak_gib - peak_gib(self.sums)


@dataclass
class LagrangianSearch:
    """Search of one model; `report` takes every assignment and returns the seconds and the peak (GiB) of its plan."""

    model: Model
    report: Callable[[Sequence[int]], tuple[float, float]]
    deadline: float
    limit_gib: float = np.inf
    gap: float = 1e-4
    best: float = np.inf
    planes: list[Floats] = field(default_factory=list)
    # Cutting planes: the minimum at some multipliers, before the limits are subtracted.
    answers: list[tuple[float, Floats]] = field(default_factory=list)
    proved: float = 0.0
    found: dict[tuple[int, ...], Candidate] = field(default_factory=dict)
    # Plans that surely fit, or surely do not, and are not priced: their seconds and memory are estimates.
    passed: list[Candidate] = field(default_factory=list)
    # Minimum at each multiplier tried.
    looked: list[WeightedMinimum] = field(default_factory=list)
    # Hinge multipliers of the search without limits.
    hint: Floats | None = None
    # Multipliers between a plan that fits and one that does not.
    between: Floats = field(default_factory=lambda: np.zeros(0))
    # `proved` holds for all assignments, so it cannot be raised.
    is_enumerated: bool = False
    # No plan that was tried fits, or none can by the estimates of memory.
    is_short: bool = False
    cannot_fit: bool = False
    # The search ends with its time, also if no plan fits by then.
    keeps_time: bool = False
    # Gives another assignment to price after one, or None.
    beside: Callable[[Sequence[int]], list[int] | None] = lambda chosen: None
    # Lower bounds at some multipliers in which a shared reshard counts once.
    counted: list[tuple[float, Floats]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.hinges = Hinges.of(self.model.setting)
        self.elimination = Elimination.of(self.model)
        self.count = len(self.hinges.offsets)

    @cached_property
    def places(self) -> Ints:
        return places_of(self.model)

    @property
    def is_limited(self) -> bool:
        return bool(np.isfinite(self.limit_gib))

    @cached_property
    def shares(self) -> ReshardShares:
        """Shares of reshards that several ops pay."""
        return ReshardShares(self.model)

    @property
    def least_limit_gib(self) -> float:
        """Memory that the estimate of a plan may have. None is taken to need less than any priced plan."""
        return self.limit_gib - min(0.0, self.least_error_gib)

    @property
    def bound(self) -> float:
        """Best proved bound; after `count_once`."""
        return max([self.proved, *(self.answer_at(answer, self.least_limit_gib) for answer in self._proofs)])

    @property
    def _proofs(self) -> list[tuple[float, Floats]]:
        """Return the lower bounds on every plan, at some multipliers."""
        return self.counted if self.shares.groups else self.answers

    @property
    def model_bound(self) -> float:
        """Best bound of the model, which counts a shared reshard for each op: some plan may be faster."""
        return self._bound_at(self.least_limit_gib)

    def _bound_at(self, limit_gib: float) -> float:
        return max([self.proved, *(self.answer_at(answer, limit_gib) for answer in self.answers)])

    def answer_at(self, answer: tuple[float, Floats], limit_gib: float) -> float:
        value, prices = answer
        of_memory = float(prices[self.count :].sum())
        return value - limit_gib * of_memory if of_memory else value

    @property
    def aim_gib(self) -> float:
        """Estimated memory that a plan may have: the limit less the estimation error of the plan closest to it."""
        if not self.is_limited:
            return np.inf
        closest = min(self.found.values(), key=lambda one: abs(one.peak_gib - self.limit_gib), default=None)
        missed = 0.0 if closest is None else closest.error_gib
        return self.limit_gib - missed

    @property
    def accuracy(self) -> float:
        """Return by which share of it a bound may be below the least that it can be."""
        return max(0.1 * self.gap, self.elimination.plan.rounding)

    @property
    def is_closed(self) -> bool:
        return bool(np.isfinite(self.best)) and self.best - self.model_bound <= self.gap * self.best

    def run(self) -> None:
        """Improve the multipliers until the gap is closed, nothing moves, or the time is up."""
        if not self.is_limited:
            self._improve()
            if self.best - self.model_bound > WIDE * self.best and len(self.model.variables) <= MANY:
                self._blend()
            return
        self.between = self._between()
        self._try_looked()
        if len(self.model.variables) <= FEW:
            self.widen()

    def _between(self) -> Floats:
        """Price two plans at the multipliers with the highest bound: one that fits, and a faster one that does not.

        The memory estimate is used until a plan is priced, which gives its error. Another plan may have a smaller
        error, so the limit moves by at most half of what it could.
        """
        if self.hint is not None:
            self._minimum_at(np.append(self.hint, np.zeros(len(MOMENTS))))
        prices, aim = np.zeros(self.count + len(MOMENTS)), self.aim_gib
        for _ in range(MOST_AIMS):
            prices = self.highest_multipliers(aim)
            if self.model_bound >= FORBIDDEN_SECONDS:
                return prices
            found = self.try_out(self._candidate(prices, 1 + NUDGED))
            if self.is_closed or self.is_late():
                return prices
            if found.peak_gib <= self.limit_gib:
                break
            least = min(peak_gib(one.sums) for one in (*self.found.values(), *self.passed))
            aim = max(self.aim_gib, (aim + least) / 2)
        if prices[self.count :].any():
            # A fast plan that takes too much memory: spliced with others it may fit.
            self.passed.append(self._estimated(self._candidate(prices, 1 - NUDGED)))
        self.highest_multipliers(self.limit_gib - min(0.0, self.least_error_gib))
        return prices

    def _try_looked(self) -> None:
        """Price the best minima of earlier multipliers that fit; keep faster ones that do not, to be spliced."""
        priced = 0
        every = zip(self.looked, self.answers, strict=True)
        for least, (_, prices) in sorted(every, key=lambda one: self.hinges.seconds(one[0].sums)):
            if self.is_closed or self.is_late() or self.hinges.seconds(least.sums) > HOPELESS * self.best:
                return
            fits = peak_gib(least.sums) + self.least_error_gib <= self.limit_gib
            if priced < MOST_LOOKED and fits:
                priced += 1
                self.try_out(self._candidate(prices, 1.0))
            elif not fits:
                self.passed.append(self._estimated(self._candidate(prices, 1.0)))

    def _blend(self) -> None:
        """Find minima beside the best multipliers: their layers trade one kind of traffic for another."""
        prices = self.hinge_multipliers()
        is_small = len(self.model.variables) <= FEW
        ends = list(product((0.0, 1.0), repeat=self.count)) if is_small else [(end,) * self.count for end in (0.0, 1.0)]
        for at in (prices, *(prices + step * (np.array(end) - prices) for step, end in product(BLENDS, ends))):
            if self.is_closed or self.is_late():
                return
            weights, _ = self.hinges.weights(at)
            self.try_out(self.elimination.candidate(weights))

    @property
    def is_wide(self) -> bool:
        """Return whether a large gap is left in a model that is quick to search again."""
        many = FEW < len(self.model.variables) <= MANY
        return many and self.is_limited and self.best - self.model_bound > WIDE * self.best

    def widen(self) -> None:
        """Try minima at other multipliers: where layers are few or differ, steps between neighbouring minima are
        large.
        """
        prices = self.between
        if not prices[self.count :].any():
            return
        beside = np.append(np.ones(self.count) if self.hint is None else self.hint, prices[self.count :])
        for exponent, at in product(SCANNED, (prices, beside)):
            if self.is_closed or self.is_late():
                return
            weights, _ = self.hinges.weights(at[: self.count])
            chosen = self.elimination.candidate(weights + 2.0**exponent * at[self.count :] @ MOMENTS)
            one = self._estimated(chosen)
            self.planes.append(one.sums)
            may_be_best = one.peak_gib <= self.limit_gib and one.seconds <= HOPELESS * self.best
            if may_be_best or len(self.model.variables) <= FEW:
                self.try_out(chosen)
            elif one.seconds <= FAR * self.best:
                self.passed.append(one)  # it may be spliced with others

    def highest_multipliers(self, aim_gib: float) -> Floats:
        """Return the multipliers with the highest bound under a memory estimate of `aim_gib`; no plan is priced."""
        # Late or not, one minimum is found: candidates begin from it.
        if not self.looked:
            self._minimum_at(np.append(np.ones(self.count), np.zeros(len(MOMENTS))))
        upper, prices = self._master(aim_gib)
        for _ in range(MOST_ROUNDS):
            if upper - self._bound_at(aim_gib) <= self.accuracy * abs(upper) or self.is_late():
                break
            self._minimum_at(prices)
            upper, prices = self._master(aim_gib)
        return prices

    def is_late(self) -> bool:
        ends = self.keeps_time or self.cannot_fit or bool(np.isfinite(self.best))
        return ends and time.monotonic() > self.deadline

    def _candidate(self, prices: Floats, share: float) -> list[int]:
        """Return the minimum at known multipliers, with those of memory a little higher or lower."""
        weights, _ = self.hinges.weights(prices[: self.count])
        weights = weights + share * prices[self.count :] @ MOMENTS
        near = min(self.looked, key=lambda least: float(weights @ least.sums))
        return self.elimination.candidate(weights, near.chosen)

    def _estimated(self, chosen: list[int]) -> Candidate:
        """Return an assignment that is not priced; no plan is taken to need less memory than a priced one does."""
        sums = self.model.sums(chosen)
        return Candidate(chosen, sums, self.hinges.seconds(sums), peak_gib(sums) + self.least_error_gib)

    def record_fitting(self, chosen: list[int]) -> Candidate | None:
        """Record a plan that surely fits without pricing it; spliced with others it gives a faster one."""
        sums = self.model.sums(chosen)
        if len(self.model.variables) <= FEW or peak_gib(sums) > SURELY_FITS * self.limit_gib:
            return None
        self.passed.append(Candidate(chosen, sums, self.hinges.seconds(sums), peak_gib(sums)))
        return self.passed[-1]

    def end(self) -> None:
        """Price the unpriced plans that surely fit, if no other plan fits."""
        for one in sorted(self.passed, key=by_seconds):
            if one.peak_gib <= self.limit_gib and not np.isfinite(self.best):
                self.try_out(one.chosen)

    def _improve(self) -> None:
        """Search without a memory limit: price the minimum at the best multipliers in every round."""
        prices = np.zeros(self.count + len(MOMENTS))
        for _ in range(MOST_ROUNDS):
            self._minimum_at(prices)
            self.try_out(self._candidate(prices, 1.0))
            if self.is_closed or self.model_bound >= FORBIDDEN_SECONDS or time.monotonic() > self.deadline:
                return
            upper, prices = self._master(np.inf)
            if upper - self.model_bound <= self.accuracy * abs(upper):
                return

    def is_close(self, bound: float) -> bool:
        """Return whether a bound leaves a gap that elimination by classes is too slow for."""
        return self.best - bound <= (CLOSE_IF_LIMITED if self.is_limited else CLOSE) * self.best

    def begin_shares(self) -> None:
        """Give the shares of reshards to the ops that pay them in the best plan, or in the latest minimum."""
        best = min(self.found.values(), key=by_seconds, default=None)
        self.shares.begin(self.looked[-1].chosen if best is None else best.chosen)

    def refine(self) -> bool:
        """Raise the bound of a model with cut variables by elimination by classes, at multipliers near the best.

        After `count_once`. Shared reshards count once here, too, where that makes little difference. Return whether
        plans were priced.
        """
        if not self.elimination.is_rough or not self.answers or self.is_close(self.bound) or self.is_late():
            return False
        limit = self.least_limit_gib
        known, prices, _, _ = self.best_answer(limit)
        rough, planes = self.elimination, self.planes
        self.elimination = rough.by_classes()
        if self.elimination is rough:
            return False
        # Sums of minima with cut variables bound no others.
        self.planes = [one.sums for one in (*self.found.values(), *self.passed)]
        self.begin_shares()
        shares = self.shares if self.shares.groups else None
        for _ in range(MOST_REFINED):
            if shares is not None and self._minimum_at(prices, shares) > LITTLE * (self.best - self.bound):
                shares = None  # `count_once` closes this part of the gap, and the plane is beside the model's least
                self.planes.pop()
            if shares is None:
                self._minimum_at(prices)
            if self.model_bound <= known:  # as much is cut as before
                self.elimination, self.planes = rough, planes
                return False
            weights, _ = self.hinges.weights(prices[: self.count])
            self.try_out(self.elimination.candidate(weights + prices[self.count :] @ MOMENTS, self.looked[-1].chosen))
            upper, prices = self._master(limit)
            enough = max(self.accuracy * abs(upper), LITTLE * (self.best - self.model_bound))
            if upper - self.model_bound <= enough or self.is_late():
                break
        return True

    def best_answer(self, limit_gib: float) -> tuple[float, Floats, Floats, float]:
        """Return the best bound of the model, its multipliers, and the weights and the constant at these."""
        answer = max(self.answers, key=lambda one: self.answer_at(one, limit_gib))
        prices = answer[1]
        weights, constant = self.hinges.weights(prices[: self.count])
        return self.answer_at(answer, limit_gib), prices, weights + prices[self.count :] @ MOMENTS, constant

    # -- one round

    def _minimum_at(self, prices: Floats, shares: ReshardShares | None = None) -> float:
        """Find the minimum at some multipliers; record its bound and its cutting plane.

        With `shares` no reshard counts more than once in the bound. Return what they count more in the cutting plane.
        """
        hinges, constant = self.hinges.weights(prices[: self.count])
        weights = hinges + prices[self.count :] @ MOMENTS
        least = self.elimination.least(weights, shares)
        self.answers.append((least.value + constant, prices))
        if shares is not None:
            self.counted.append(self.answers[-1])
        self.planes.append(least.sums)
        self.looked.append(least)
        return float(weights @ least.sums) - least.value

    def try_out(self, chosen: list[int], hopeless: bool = True) -> Candidate:
        """Price a candidate, and record the error of its memory estimate."""
        key = tuple(chosen)
        known = self.found.get(key)
        if known is None:
            sums = self.model.sums(chosen)
            guess = self.hinges.seconds(sums)
            if hopeless and not self.is_limited and guess > HOPELESS * self.best:
                self.passed.append(Candidate(chosen, sums, guess, 0.0))  # spliced with others it may be faster
                return self.passed[-1]
            seconds, peak = self.report(chosen)
            known = self.found[key] = Candidate(chosen, sums, seconds, peak)
            if peak <= self.limit_gib:
                self.best = min(self.best, seconds)
            if seconds > (1 + WIDE) * guess and (other := self.beside(chosen)) is not None:
                self.try_out(other, hopeless)  # buckets that are not full make the difference
        return known

    def _master(self, aim_gib: float) -> tuple[float, Floats]:
        """Return the multipliers at which the lowest cutting plane is highest, under a memory estimate of `aim_gib`."""
        sums = np.array(self.planes)
        excess = sums @ MOMENTS.T - aim_gib if np.isfinite(aim_gib) else np.zeros((len(sums), len(MOMENTS)))
        slopes = np.column_stack([sums @ self.hinges.slopes.T + self.hinges.offsets, excess])
        scale = max(self.best if np.isfinite(self.best) else 1.0, 1e-9)
        dearest = HIGHEST_MULTIPLIER * scale if np.isfinite(aim_gib) else 0.0
        most = np.array([1.0] * self.count + [dearest] * len(MOMENTS))
        least, prices = best_multipliers((sums @ self.hinges.base + self.hinges.constant) / scale, slopes / scale, most)
        return least * scale, prices

    def hinge_multipliers(self) -> Floats:
        """Return the hinge multipliers of the best bound."""
        _, prices = max(self.answers, key=lambda answer: self.answer_at(answer, self.limit_gib), default=(0.0, None))
        return np.zeros(self.count) if prices is None else prices[: self.count]

    @property
    def least_error_gib(self) -> float:
        """Return the smallest error of the memory estimate among priced plans."""
        return min((found.error_gib for found in self.found.values()), default=0.0)


def by_seconds(one: Candidate) -> float:
    return one.seconds
