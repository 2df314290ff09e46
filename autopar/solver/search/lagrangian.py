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

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product

import numpy as np

from autopar.solver.arrays import Floats, Ints
from autopar.solver.model.model import Model
from autopar.solver.model.objective import FORBIDDEN_SECONDS, MOMENTS, Hinges, Sum, peak_gib
from autopar.solver.search.branch_and_bound import close
from autopar.solver.search.cutting_plane import highest
from autopar.solver.search.elimination import Elimination, WeightedMinimum
from autopar.solver.search.enumerate import EnumeratedModel, listed
from autopar.solver.search.splice import Splices, places_of

__all__ = ["Candidate", "LagrangianSearch"]

MOST_ROUNDS = 25
FEW, MANY = 600, 2500
"""Variables of a model in which one op weighs so much that more candidates than those at the best prices are priced;
and of one in which they are if much is left to gain."""
WIDE = 0.01
SCANNED = (-8, -6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6)
"""Powers of two of the best prices of memory, that are tried too."""
MOST_AIMS = 4
BELIEVED = 0.8
"""Of the limit: a plan of many variables that is counted to take no more is believed to fit."""
NUDGED = 1e-3
"""Of the prices of memory, by which they are raised for a plan that fits, and lowered for one that is faster."""
ALIKE = 2e-3
"""Plans that differ by no more than this part of their seconds and memory make the same mixtures."""
HOPELESS = 1.002
"""Candidates that are believed to be so much slower than the best are not priced."""
SMALL = 24
"""Variables of a model that is small enough to try whatever could still be better."""
MOST_CLOSED = 2000
MOST_LISTED = 4000
"""Candidates that are priced to prove that nothing is better; of those that can be listed, that is quick."""
FIRST_LISTED = 125
PRICES_LISTED = (0, 3, 6)
"""Powers of two of prices of memory, of seconds per byte of the fastest plan that takes all there is."""
LEAST = ((0.5, 0.0, 0.5), (1.0, 0.0, 0.0), (0.0, 0.0, 1.0), (0.25, 0.5, 0.25), (0.0, 1.0, 0.0))
"""The weights of the moments of which the least is sought, where the least memory of all is."""
LESS = 1e-3
"""What is tried is this part less than the least memory that was found."""
HIGHEST_PRICE = 1e3
"""Seconds per GiB and second of the step: no memory is worth more."""


@dataclass(frozen=True)
class Candidate:
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
class LagrangianSearch:
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
    found: dict[tuple[int, ...], Candidate] = field(default_factory=dict)
    passed: list[Candidate] = field(default_factory=list)
    """What was not priced, as it surely fits, or does not: its seconds and memory are those of its sums."""
    looked: list[WeightedMinimum] = field(default_factory=list)
    """What was the least at prices that were looked at."""
    hint: Floats | None = None
    """Prices of the hinges that were good without limits."""
    between: Floats = field(default_factory=lambda: np.zeros(0))
    """The prices between a plan that fits and one that does not."""
    is_listed: bool = False
    """Whether `proved` is of all assignments, and so the best that can be said."""

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

    @property
    def bound(self) -> float:
        """The best that is proved; of memory, no plan is taken to need less than is counted, or than any did."""
        return self._bound_at(self.limit_gib - min(0.0, self._least_missed))

    def _bound_at(self, limit_gib: float) -> float:
        return max([self.proved, *(self._answer_at(answer, limit_gib) for answer in self.answers)])

    def _answer_at(self, answer: tuple[float, Floats], limit_gib: float) -> float:
        value, prices = answer
        of_memory = float(prices[self.count :].sum())
        return value - limit_gib * of_memory if of_memory else value

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
        if not self.is_limited:
            self._improve()
            return
        self.between = self._between()
        if len(self.model.variables) <= FEW:
            self.widen()

    def _between(self) -> Floats:
        """Two plans at the prices where the bound is highest: one that fits, and one that is faster and does not.

        What is counted of memory is believed until a plan is priced, which tells what is missed. Another may miss less:
        at once no more is given up than half of what could be.
        """
        if self.hint is not None or not self.planes:
            self._look(np.append(np.ones(self.count) if self.hint is None else self.hint, np.zeros(len(MOMENTS))))
        prices, aim = np.zeros(self.count + len(MOMENTS)), self.aim_gib
        for _ in range(MOST_AIMS):
            prices = self._highest(aim)
            if self.bound >= FORBIDDEN_SECONDS:
                return prices
            found = self.try_out(self._candidate(prices, 1 + NUDGED))
            if self.is_closed or self._is_late():
                return prices
            if found.peak_gib <= self.limit_gib:
                break
            least = min(peak_gib(one.sums) for one in (*self.found.values(), *self.passed))
            aim = max(self.aim_gib, (aim + least) / 2)
        if prices[self.count :].any():
            self._pass_by(self._candidate(prices, 1 - NUDGED))
        self._highest(self.limit_gib - min(0.0, self._least_missed))
        return prices

    @property
    def is_wide(self) -> bool:
        """Whether much is left between what was found and what is proved, in a model that is soon searched again."""
        many = FEW < len(self.model.variables) <= MANY
        return many and self.is_limited and self.best - self.bound > WIDE * self.best

    def widen(self) -> None:
        """What is least at other prices: where layers are few or differ, none of them is a small step."""
        prices = self.between
        if not prices[self.count :].any():
            return
        beside = np.append(np.ones(self.count) if self.hint is None else self.hint, prices[self.count :])
        for exponent, at in product(SCANNED, (prices, beside)):
            if self.is_closed or self._is_late():
                return
            weights, _ = self.hinges.weights(at[: self.count])
            chosen = self.elimination.candidate(weights + 2.0**exponent * at[self.count :] @ MOMENTS)
            self.planes.append(self.model.sums(chosen))
            self.try_out(chosen)

    def _highest(self, aim_gib: float) -> Floats:
        """The prices at which the bound is highest, where so much memory may be counted; no plan is priced."""
        upper, prices = self._master(aim_gib)
        for _ in range(MOST_ROUNDS):
            if upper - self._bound_at(aim_gib) <= 0.1 * self.gap * abs(upper) or self._is_late():
                break
            self._look(prices)
            upper, prices = self._master(aim_gib)
        return prices

    def _is_late(self) -> bool:
        return time.monotonic() > self.deadline and bool(np.isfinite(self.best))

    def _candidate(self, prices: Floats, share: float) -> list[int]:
        """What is least at prices that were looked at, those of memory a little higher or lower."""
        weights, _ = self.hinges.weights(prices[: self.count])
        weights = weights + share * prices[self.count :] @ MOMENTS
        near = min(self.looked, key=lambda least: float(weights @ least.sums))
        return self.elimination.candidate(weights, near.chosen)

    def _believed(self, chosen: list[int]) -> Candidate | None:
        """A plan that is not priced, as it surely fits: with others it makes a faster one."""
        sums = self.model.sums(chosen)
        if len(self.model.variables) <= FEW or peak_gib(sums) > BELIEVED * self.limit_gib:
            return None
        self.passed.append(Candidate(chosen, sums, self.hinges.seconds(sums), peak_gib(sums)))
        return self.passed[-1]

    def end(self) -> None:
        """Price what is only believed to fit, if nothing else does."""
        for one in sorted(self.passed, key=_by_seconds):
            if one.peak_gib <= self.limit_gib and not np.isfinite(self.best):
                self.try_out(one.chosen)

    def _pass_by(self, chosen: list[int]) -> None:
        """What is fast and takes too much: with others it may make something that fits."""
        sums = self.model.sums(chosen)
        self.passed.append(Candidate(chosen, sums, self.hinges.seconds(sums), peak_gib(sums) + self._least_missed))

    def _improve(self) -> None:
        """Without a limit: what is least at the best prices is priced in every round."""
        prices = np.zeros(self.count + len(MOMENTS))
        for _ in range(MOST_ROUNDS):
            self._look(prices)
            self.try_out(self._candidate(prices, 1.0))
            if self.is_closed or self.bound >= FORBIDDEN_SECONDS or time.monotonic() > self.deadline:
                return
            upper, prices = self._master(np.inf)
            if upper - self.bound <= 0.1 * self.gap * abs(upper):
                return

    # -- one round

    def _look(self, prices: Floats) -> None:
        """What is proved at some prices, and a plane for all."""
        weights, constant = self.hinges.weights(prices[: self.count])
        least = self.elimination.least(weights + prices[self.count :] @ MOMENTS)
        self.answers.append((least.value + constant, prices))
        self.planes.append(least.sums)
        self.looked.append(least)

    def try_out(self, chosen: list[int], hopeless: bool = True) -> Candidate:
        """Price a candidate; heed what it says about memory."""
        key = tuple(chosen)
        known = self.found.get(key)
        if known is None:
            sums = self.model.sums(chosen)
            guess = self.hinges.seconds(sums)
            if hopeless and not self.is_limited and guess > HOPELESS * self.best:
                return Candidate(chosen, sums, guess, 0.0)
            seconds, peak = self.report(chosen)
            known = self.found[key] = Candidate(chosen, sums, seconds, peak)
            if peak <= self.limit_gib:
                self.best = min(self.best, seconds)
        return known

    def _master(self, aim_gib: float) -> tuple[float, Floats]:
        """The prices at which the least plane is highest, where so much memory may be counted."""
        sums = np.array(self.planes)
        excess = sums @ MOMENTS.T - aim_gib if np.isfinite(aim_gib) else np.zeros((len(sums), len(MOMENTS)))
        slopes = np.column_stack([sums @ self.hinges.slopes.T + self.hinges.offsets, excess])
        scale = max(self.best if np.isfinite(self.best) else 1.0, 1e-9)
        dearest = HIGHEST_PRICE * scale if np.isfinite(aim_gib) else 0.0
        most = np.array([1.0] * self.count + [dearest] * len(MOMENTS))
        least, prices = highest((sums @ self.hinges.base + self.hinges.constant) / scale, slopes / scale, most)
        return least * scale, prices

    def prices_of_hinges(self) -> Floats:
        """Those of the best bound."""
        _, prices = max(self.answers, key=lambda answer: self._answer_at(answer, self.limit_gib), default=(0.0, None))
        return np.zeros(self.count) if prices is None else prices[: self.count]

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
        self.proved = max(self.proved, self._close(self._highest(np.inf), most))

    def _close_listed(self, everything: EnumeratedModel) -> None:
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

    def least_memory(self) -> Candidate:
        """The plan that takes least, of a few weights of the moments of a step; priced unless it surely fits."""
        tried = []
        for shares in LEAST:
            weights = 1e-9 * self.hinges.base + np.array(shares) @ MOMENTS
            weights[Sum.FORBIDDEN] = FORBIDDEN_SECONDS
            chosen = self.elimination.candidate(weights)
            self.planes.append(self.model.sums(chosen))
            tried.append(self._believed(chosen) or self.try_out(chosen))
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
        """Mixtures of plans that fit: with those that are faster and do not fit, or with those that send less beside
        the computing, or more. In a model that is not large, what is found is mixed once more."""
        count = len(self.model.variables)
        ends_and_priced = MIXED_IF_LARGE if count > MANY else MIXED if count > FEW else MIXED_IF_SMALL
        for _ in range(1 if count > MANY else MOST_MIXINGS):
            best = self.best
            self._mix(*ends_and_priced)
            if self.best >= best * (1 - WORTHWHILE):
                return

    def _mix(self, most_ends: int, most_priced: int) -> None:
        """The best mixture of all pairs is priced, over and over: it tells what is missed of memory. Where some fit and
        are no better, what is counted of time does not tell them apart; in a large model, one that fits will do."""
        every = [*self.found.values(), *self.passed]
        fits = sorted((one for one in every if one.peak_gib <= self.limit_gib), key=_by_seconds)
        if not fits or self.is_closed:
            return
        others = [one for one in every if one is not fits[0]]
        passes = sorted((one for one in others if one.peak_gib > self.limit_gib), key=_by_memory)
        if passes:
            ends = {
                id(one): one for one in (*_unlike(fits, most_ends), *_unlike(sorted(fits, key=_by_memory), most_ends))
            }
            pairs = [(one, other) for one in ends.values() for other in _unlike(passes, most_ends)]
        else:
            pairs = [(fits[0], other) for other in _unlike(sorted(others, key=_by_seconds), most_ends)]
        mixed = [self._mixed(*ordered) for one, other in pairs for ordered in ((one, other), (other, one))]
        most_found, is_large, in_vain = len(self.found) + most_priced, len(self.model.variables) > MANY, 0
        while mixed and len(self.found) < most_found and in_vain < (1 if is_large else 2):
            mixtures = min(mixed, key=lambda each: each.least(self.limit_gib)[0])
            seconds, place = mixtures.least(self.limit_gib)
            best = self.best
            if seconds >= best * (1 - self.gap) or self._is_late():
                return
            found = self.try_out(mixtures.at(place))
            mixtures.tell(place, found.missed_gib)
            is_no_better = self.best >= best * (1 - self.gap)
            in_vain += found.peak_gib <= self.limit_gib and (is_large or is_no_better)

    def _mixed(self, first: Candidate, then: Candidate) -> Splices:
        mixtures = Splices.of(self.model, self.hinges, self.places, first.chosen, then.chosen)
        for place, one in ((0, then), (len(mixtures.sums) - 1, first)):
            if tuple(one.chosen) in self.found:
                mixtures.tell(place, one.missed_gib)
        return mixtures


def _by_seconds(one: Candidate) -> float:
    return one.seconds


def _by_memory(one: Candidate) -> float:
    return one.peak_gib


def _unlike(every: Sequence[Candidate], most: int) -> list[Candidate]:
    """The first of some, but none whose sums say nearly the same of time and memory as those of one before."""
    found: dict[tuple[int, ...], Candidate] = {}
    for one in every:
        counted = one.peak_gib - one.missed_gib
        key = tuple(round(math.log(max(amount, 1e-12)) / ALIKE) for amount in (one.seconds, counted))
        found.setdefault(key, one)
        if len(found) == most:
            break
    return list(found.values())


MIXED_IF_SMALL, MIXED, MIXED_IF_LARGE = (4, 20), (4, 12), (2, 5)
"""Of each kind, so many plans are mixed, and so many mixtures priced."""
MOST_MIXINGS, WORTHWHILE = 3, 1e-3
"""Rounds, of which each but the last has to gain so much."""
