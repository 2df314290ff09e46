"""Proof of small models: price every assignment that could still be better than the incumbent."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from math import prod

import numpy as np
from numpy.typing import NDArray

from autopar.solver import Floats
from autopar.solver.model.model import Model
from autopar.solver.model.objective import FORBIDDEN_SECONDS, MOMENTS, Hinges, Sum, every_peak_gib
from autopar.solver.model.shared_reshards import reshard_parts, shared_tensors, sum_parts, sums_of_column
from autopar.solver.search.count_once import ROUNDS
from autopar.solver.search.elimination import Elimination
from autopar.solver.search.lagrangian import LagrangianSearch, by_seconds
from autopar.solver.search.reshard_shares import ReshardShares

__all__ = ["EnumeratedModel", "close", "enumerated", "prove_small"]


# -- enumeration -------------------------------------------------------------------------------------------------------


# Assignments that are enumerated at most: some 10 MB of sums.
MOST_LISTED = 2**17


@dataclass(frozen=True)
class EnumeratedModel:
    """Seconds and memory of every assignment of a model, in the order of their states."""

    counts: tuple[int, ...]
    # Lower bound on every plan.
    seconds: Floats
    gib: Floats

    def in_order(self, keys: Floats) -> Iterator[tuple[float, list[int]]]:
        """Yield the assignments in ascending order of a key, with the key."""
        for place in np.argsort(keys, kind="stable").tolist():
            yield float(keys[place]), [int(state) for state in np.unravel_index(place, self.counts)]


def enumerated(model: Model, hinges: Hinges) -> EnumeratedModel | None:
    """Return the enumerated model; None if it has too many assignments."""
    counts = tuple(len(variable.states) for variable in model.variables)
    if prod(counts) > MOST_LISTED:
        return None
    every = _sums(model, counts).reshape(-1, len(Sum))
    return EnumeratedModel(counts, hinges.every_seconds(every), every_peak_gib(every))


def _sums(model: Model, counts: tuple[int, ...]) -> Floats:
    """Return the sums of all assignments: an axis for each variable, the last one for the sums."""
    total = np.zeros((*counts, len(Sum)))
    for node, variable in enumerate(model.variables):
        own = np.array([variable.at(state) for state in range(counts[node])])
        total += _spread(own, (node,), len(counts))
    for factor in model.factors:
        shape = [counts[node] for node in factor.scope]
        sums = np.array([factor.table.at(*states) for states in np.ndindex(*shape)]).reshape(*shape, len(Sum))
        order = np.argsort(factor.scope).tolist()
        total += _spread(sums.transpose(*order, len(shape)), tuple(sorted(factor.scope)), len(counts))
    _subtract_shared_reshards(model, counts, total)
    return total


def _subtract_shared_reshards(model: Model, counts: tuple[int, ...], total: Floats) -> None:
    """Subtract shared reshards: for every op but one that takes a tensor in one sharding, at most its reshard.

    The gradients of these ops are added in that sharding.
    """
    for one in shared_tensors(model):
        states = model.variables[one.place].states
        for want in one.wants:
            ops = [(use.place, np.array([want in each for each in use.wants], dtype=float)) for use in one.uses]
            times = sum(_spread(takes[:, None], (node,), len(counts)) for node, takes in ops)
            paid = np.array([[want in each] for each in one.returned], dtype=float)
            made, tensor = model.cost_tables, one.tensor
            price = sums_of_column(reshard_parts(made, tensor, states, (want,), True, True), len(states)).T
            sums = sums_of_column(sum_parts(made, tensor, states, (want,)), len(states)).T
            again = np.maximum(0.0, times - 1)
            total -= again * _spread(price - sums, (one.place,), len(counts))
            total -= np.minimum(times, 1) * _spread(paid * price, (one.place,), len(counts))


def _spread(sums: Floats, scope: tuple[int, ...], count: int) -> Floats:
    """Return a table over some variables as one over all."""
    shape = [1] * count
    for axis, node in enumerate(scope):
        shape[node] = sums.shape[axis]
    return sums.reshape(*shape, sums.shape[-1])


# -- branch and bound --------------------------------------------------------------------------------------------------


Masks = tuple[NDArray[np.bool_], ...]


@dataclass(frozen=True)
class _Part:
    """Set of assignments: the allowed states of each variable."""

    masks: Masks
    chosen: list[int]


def close(
    elimination: Elimination,
    terms: tuple[list[Floats], list[Floats]],
    best: float,
    price: Callable[[list[int]], float],
    most: int,
    deadline: float,
) -> float:
    """Return a bound on every assignment that could beat the incumbent, after at most `most` candidates.

    `terms` are the weighted costs of states and of pairs. `price` evaluates an assignment and returns the value to
    beat; `best` is that value at the start.
    """
    costs, tables = terms
    order = count()
    parts: list[tuple[float, int, _Part]] = []

    def add(masks: Masks) -> None:
        left = [np.where(mask, own, np.inf) for mask, own in zip(masks, costs, strict=True)]
        value, chosen = elimination.plan.solve(left, tables)
        if np.isfinite(value):
            heapq.heappush(parts, (value, next(order), _Part(masks, chosen)))

    add(tuple(np.ones(len(own), dtype=bool) for own in costs))
    for _ in range(most):
        if not parts or parts[0][0] >= best or time.monotonic() > deadline:
            break
        _, _, part = heapq.heappop(parts)
        best = price(part.chosen)
        masks = list(part.masks)
        for place, state in enumerate(part.chosen):
            if masks[place].sum() > 1:
                others = masks[place].copy()
                others[state] = False
                add((*masks[:place], others, *masks[place + 1 :]))
            masks[place] = np.arange(len(costs[place])) == state
    return min(parts[0][0], best) if parts else best


# Models of at most this many variables are proved by branch and bound.
SMALL = 24
MOST_CLOSED = 2000
# Candidates priced at most for a proof, and of an enumerated model, which is quick.
MOST_ENUMERATED = 4000
FIRST_ENUMERATED = 125
# Powers of two of memory multipliers, relative to seconds per byte of the fastest plan that fills the device.
MULTIPLIERS_ENUMERATED = (0, 3, 6)


def is_small(search: LagrangianSearch) -> bool:
    decided = sum(variable.kind != "recompute" for variable in search.model.variables)
    return decided <= SMALL and not search.elimination.cut


def prove_small(search: LagrangianSearch, most: int = MOST_CLOSED) -> None:
    """Prove small models: price every assignment that could still be better.

    Under a memory limit, first in the order of memory until something fits, then by time and weighted memory
    together, which finds good plans that fit. Then by time alone, which proves. The memory estimate proves
    nothing: in a small model its error may be anything.
    """
    if not is_small(search):
        return
    everything = enumerated(search.model, search.hinges)
    if everything is not None:
        _close_enumerated(search, everything)
        return
    if search.best <= search.bound:
        return
    _, prices = max(search.answers, key=lambda answer: search.answer_at(answer, search.aim_gib), default=(0.0, None))
    if search.is_limited:
        if not np.isfinite(search.best):
            _close_for_memory(search, most // 4)
        if prices is not None and prices[search.count :].any():
            _close(search, prices, most // 4)
    search.proved = max(search.proved, _close(search, search.highest_multipliers(np.inf), most))


def _close_enumerated(search: LagrangianSearch, everything: EnumeratedModel) -> None:
    """Prove a model that can be enumerated, at several memory multipliers, as none is known to be right."""
    seconds = everything.seconds
    gib = np.where(seconds < FORBIDDEN_SECONDS, everything.gib, np.inf)

    def best() -> float:
        return search.best

    def tried(keys: Floats, most: int, below: Callable[[], float] = best) -> float:
        for number, (key, chosen) in enumerate(everything.in_order(keys)):
            if number == most or key >= min(below(), FORBIDDEN_SECONDS) or time.monotonic() > search.deadline:
                return min(key, below())
            search.try_out(chosen, hopeless=False)
        return below()

    if search.is_limited and tried(seconds, FIRST_ENUMERATED) < best():
        if not np.isfinite(best()):
            tried(gib, 2 * FIRST_ENUMERATED, lambda: -np.inf if np.isfinite(best()) else np.inf)
        scale = float(seconds.min()) / max(search.limit_gib, 1e-12)
        for exponent in MULTIPLIERS_ENUMERATED:
            tried(seconds + scale * 2.0**exponent * gib, FIRST_ENUMERATED, lambda: np.inf)
    search.proved = tried(seconds, MOST_ENUMERATED)
    search.is_enumerated = True


def _close(search: LagrangianSearch, prices: Floats, most: int) -> float:
    """Price assignments in the order of their bounds at some multipliers; return a bound on the seconds if memory
    has none.
    """
    weights, constant = search.hinges.weights(prices[: search.count])
    weights = weights + prices[search.count :] @ MOMENTS
    of_memory = float(prices[search.count :].sum())

    def below() -> float:
        room = of_memory * (search.limit_gib - search.least_error_gib) if of_memory else 0.0
        return search.best - constant + room

    def price(chosen: list[int]) -> float:
        search.try_out(chosen, hopeless=False)
        return below()

    terms = search.elimination.weighted(weights, _shares_in_parts(search, weights))
    return close(search.elimination, terms, below(), price, most, search.deadline) + constant


def _shares_in_parts(search: LagrangianSearch, weights: Floats) -> ReshardShares:
    """Return shares of reshards with a high bound on the assignments of any part."""
    shares = ReshardShares(search.model, is_whole=False)
    best = min(search.found.values(), key=by_seconds, default=None)
    if shares.groups and best is not None:
        shares.begin(best.chosen)
        target = search.elimination.least(weights).value
        for _ in range(ROUNDS):
            least = search.elimination.least(weights, shares)
            missing = target - least.value
            if missing <= search.gap * abs(target) or not shares.improve(least.chosen, weights, missing):
                break
    return shares


def _close_for_memory(search: LagrangianSearch, most: int) -> None:
    """Price assignments in the order of estimated memory, until one fits."""
    weights = MOMENTS.mean(axis=0)
    weights[Sum.FORBIDDEN] = FORBIDDEN_SECONDS

    def below() -> float:
        least = min((found.peak_gib for found in search.found.values()), default=np.inf)
        return -np.inf if least <= search.limit_gib else least - search.least_error_gib

    def price(chosen: list[int]) -> float:
        search.try_out(chosen, hopeless=False)
        return below()

    terms = search.elimination.weighted(weights, ReshardShares(search.model, is_whole=False))
    close(search.elimination, terms, below(), price, most, search.deadline)
