"""Plans of less memory: search near the memory limit, and splice plans that fit with faster ones that do not."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import combinations

import numpy as np

from autopar.solver.model.objective import FORBIDDEN_SECONDS, MOMENTS, Sum
from autopar.solver.search.lagrangian import FEW, MANY, Candidate, LagrangianSearch, by_seconds
from autopar.solver.search.splice import Splices

__all__ = ["least_memory", "lower_memory", "may_fit", "splice_plans"]

# Weights of the limited moments in the search for the least memory.
LEAST = (
    (0.25, 0.0, 0.5, 0.25),
    (0.5, 0.0, 0.0, 0.5),
    (0.0, 0.0, 1.0, 0.0),
    (0.25, 0.5, 0.25, 0.0),
    (0.0, 1.0, 0.0, 0.0),
)
# Each round aims this fraction below the least memory found.
LESS = 1e-3
# Plans whose seconds and memory differ by less than this fraction give the same splices.
ALIKE = 2e-3
# Plans of each kind that are spliced, and splices priced.
SPLICED_IF_SMALL, SPLICED, SPLICED_IF_LARGE = (4, 20), (4, 12), (2, 5)
# Plans that are spliced in pairs where none takes too much memory.
MOST_FREE_ENDS = 8
# Where a splice promises so much, more of them are priced by this factor.
PROMISING, PATIENT = 0.02, 3
# Rounds, and the gain that each but the last must reach.
MOST_ROUNDS, WORTHWHILE = 3, 1e-3


def least_memory(search: LagrangianSearch) -> Candidate:
    """Return the plan of least memory for a few weights of the limited moments; price it unless it surely fits."""
    tried = []
    for shares in LEAST:
        weights = 1e-9 * search.hinges.base + np.array(shares) @ MOMENTS
        weights[Sum.FORBIDDEN] = FORBIDDEN_SECONDS
        chosen = search.elimination.candidate(weights)
        search.planes.append(search.model.sums(chosen))
        tried.append(search.record_fitting(chosen) or search.try_out(chosen))
        if tried[-1].peak_gib <= search.limit_gib:
            break
    return min(tried, key=lambda one: one.peak_gib)


def lower_memory(search: LagrangianSearch, limit_gib: float, least_gib: float) -> None:
    """Search repeatedly under a limit just below the least memory found, at first `least_gib`, until a plan fits.

    Where the estimates prove that none can, search once: the user reads the least that was found.
    """
    # The plans of least memory are known and none fits: the search begins and ends with its time.
    search.keeps_time = True
    while time.monotonic() < search.deadline:
        least_gib = min([least_gib, *(one.peak_gib for one in search.found.values())])
        if least_gib <= limit_gib or not np.isfinite(least_gib):
            break
        search.limit_gib = least_gib * (1 - LESS)
        search.best = np.inf
        search.run()
        splice_plans(search)
        is_hopeless = search.cannot_fit or not may_fit(search, limit_gib)
        if is_hopeless or min((one.peak_gib for one in search.found.values()), default=np.inf) > search.limit_gib:
            break
    search.limit_gib, search.keeps_time = limit_gib, False


def may_fit(search: LagrangianSearch, limit_gib: float) -> bool:
    """Return whether the memory of a plan may be estimated within a limit, by the smallest error of the estimate."""
    estimates = (search.elimination.least(np.array(shares) @ MOMENTS).value for shares in LEAST)
    return all(estimate + search.least_error_gib <= limit_gib for estimate in estimates)


def splice_plans(search: LagrangianSearch) -> None:
    """Splice plans that fit with faster ones that do not, or with ones that overlap less or more traffic.

    In models that are not large, plans found this way are spliced once more.
    """
    count = len(search.model.variables)
    ends_and_priced = SPLICED_IF_LARGE if count > MANY else SPLICED if count > FEW else SPLICED_IF_SMALL
    for _ in range(1 if count > MANY else MOST_ROUNDS):
        best = search.best
        _splice(search, *ends_and_priced)
        if search.best >= best * (1 - WORTHWHILE):
            return


def _splice(search: LagrangianSearch, most_ends: int, most_priced: int) -> None:
    """Price the best splice of all pairs repeatedly; each gives the error of its memory estimate.

    If several fit and none is better, the estimated time does not separate them; in a large model one that fits is
    enough.
    """
    # Plans that break a contract, or do not fit on the host, have no time.
    every = [one for one in (*search.found.values(), *search.passed) if math.isfinite(one.seconds)]
    fits = sorted((one for one in every if one.peak_gib <= search.limit_gib), key=by_seconds)
    if not fits or search.is_closed:
        return
    passes = sorted((one for one in every if one.peak_gib > search.limit_gib), key=lambda one: one.peak_gib)
    by_memory = sorted(fits, key=lambda one: one.peak_gib)
    if passes:
        ends = {id(one): one for one in (*_unlike(fits, most_ends), *_unlike(by_memory, most_ends))}
        pairs = [(one, other) for one in ends.values() for other in _unlike(passes, most_ends)]
    else:  # any two may overlap what the other does not, also if the best plan is neither
        pairs = list(combinations(_unlike(fits, MOST_FREE_ENDS), 2))
    pairings = [_spliced(search, *ordered) for one, other in pairs for ordered in ((one, other), (other, one))]
    before, is_large, in_vain = len(search.found), len(search.model.variables) > MANY, 0
    while pairings and in_vain < (1 if is_large else 2):
        splices = min(pairings, key=lambda each: each.least(search.limit_gib)[0])
        seconds, place = splices.least(search.limit_gib)
        best = search.best
        if seconds >= best * (1 - search.gap) or search.is_late():
            return
        most = most_priced * (PATIENT if seconds < best * (1 - PROMISING) else 1)
        if len(search.found) - before >= most:
            return
        found = search.try_out(splices.at(place))
        splices.tell(place, found.error_gib, found.seconds)
        is_no_better = search.best >= best * (1 - search.gap)
        in_vain += found.peak_gib <= search.limit_gib and (is_large or is_no_better)


def _spliced(search: LagrangianSearch, first: Candidate, then: Candidate) -> Splices:
    splices = Splices.of(search.model, search.hinges, search.places, first.chosen, then.chosen)
    for place, one in ((0, then), (len(splices.sums) - 1, first)):
        if tuple(one.chosen) in search.found:
            splices.tell(place, one.error_gib, one.seconds)
    return splices


def _unlike(every: Sequence[Candidate], most: int) -> list[Candidate]:
    """Return the first items, without those whose time and memory sums nearly equal an earlier item's."""
    found: dict[tuple[int, ...], Candidate] = {}
    for one in every:
        counted = one.peak_gib - one.error_gib
        key = tuple(round(math.log(max(amount, 1e-12)) / ALIKE) for amount in (one.seconds, counted))
        found.setdefault(key, one)
        if len(found) == most:
            break
    return list(found.values())
