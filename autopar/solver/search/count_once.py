"""Bound of a search in which a reshard that several ops share counts once, as in `evaluate`."""

from __future__ import annotations

import time

from autopar.solver.model.objective import peak_gib
from autopar.solver.search.lagrangian import FEW, LagrangianSearch

__all__ = ["ROUNDS", "count_once"]

# Rounds in which the shares of reshards improve; in large models fewer.
ROUNDS, ROUNDS_IF_LARGE = 30, 12


def count_once(search: LagrangianSearch, prices_plans: bool = True) -> None:
    """Prove a bound in which a reshard that several ops share counts once, and price the better minima on the way.

    One round ends even if the time is up: the bound of the model is none.
    """
    if not search.shares.groups or not search.answers:
        return
    limit, elimination, shares = search.least_limit_gib, search.elimination, search.shares
    target, prices, weights, constant = search.best_answer(limit)
    search.begin_shares()
    is_small = len(search.model.variables) <= FEW
    for _ in range(ROUNDS if is_small else ROUNDS_IF_LARGE):
        least = elimination.least(weights, shares)
        search.counted.append((least.value + constant, prices))
        if prices_plans:
            settled = elimination.settled(least.chosen, weights)
            _try_out(search, settled)
            # A state that all ops take may stand for one that is resharded to it once.
            _try_out(search, elimination.best_kept(settled, weights, shares))
        missing = min(target, search.best) - search.answer_at(search.counted[-1], limit)
        if missing <= search.accuracy * abs(target) or time.monotonic() > search.deadline:
            return
        if elimination.is_rough and not search.is_close(search.model_bound):
            return  # shares cannot raise it enough
        if not shares.improve(least.chosen, weights, missing):
            return


def _try_out(search: LagrangianSearch, chosen: list[int]) -> None:
    """Price an assignment that is better than the incumbent where its shared reshards count once."""
    sums = search.model.sums(chosen) - search.shares.counted_again(chosen)
    fits = not search.is_limited or peak_gib(sums) + search.least_error_gib <= search.limit_gib
    if fits and search.hinges.seconds(sums) < search.best * (1 - search.gap):
        search.try_out(chosen, hopeless=False)
