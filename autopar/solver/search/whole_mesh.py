"""A bound over all choices of a mesh of up to three axes, from reshards that are priced where the minimum uses them.

Reshards begin with lower bounds (`relaxed_tables`), so the least sum is a bound at once. Each round then prices the
rows and columns of the reshards that the minimum uses, and minimises again. A search of a part of the choices gives the
multipliers.
"""

from __future__ import annotations

import time

import numpy as np

from autopar.solver import Floats, relative_gap
from autopar.solver.infeasible import OutOfTime
from autopar.solver.model.build import build, plan_of
from autopar.solver.model.objective import Hinges, Sum
from autopar.solver.model.relaxed_tables import RelaxedTables
from autopar.solver.search.bucket_elimination import TooWide
from autopar.solver.search.phases import SearchPhases
from autopar.solver.search.relaxed_model import RelaxedModel

__all__ = ["MOST_PROVED_AXES", "prove_whole"]

# On more axes the tables of all shardings are too large.
MOST_PROVED_AXES = 3
# Gap at which a bound is close enough.
CLOSE = 1e-2
# The bound has to rise by so much in so many rounds.
LEAST_RISE, MOST_STALLED = 5e-4, 4
# Time for it, as a multiple of that of the search before.
PATIENCE = 3.0


def prove_whole(work: SearchPhases, multipliers: Floats) -> float:
    """Return a bound on all plans of a mesh, at the hinge multipliers of a search of a part of its choices.

    The plan of the least sum of exact prices is offered.
    """
    incumbent, tables = work.incumbent, RelaxedTables(work.setting)
    now = time.monotonic()
    if incumbent.plan is None or now > work.deadline:
        return 0.0
    ends = min(work.deadline, now + PATIENCE * (now - incumbent.began))
    multipliers = _with_room(Hinges.of(work.setting), multipliers)
    try:
        model = build(
            work.setting,
            work.bound_layout,
            tables,
            recompute=work.bound_layout.recompute,
            deadline=work.deadline,
            has_shared_states=False,
        )
        relaxed = RelaxedModel(model, tables, incumbent.plan)
    except (OutOfTime, TooWide):
        return 0.0
    weights, constant = Hinges.of(work.setting).weights(multipliers)
    bounds: list[float] = []
    while True:
        value, chosen = relaxed.least(weights)
        bounds.append(max([value + constant, *bounds[-1:]]))
        incumbent.tell("bound", bounds[-1])
        is_exact = not relaxed.price(chosen, weights)
        stalls = len(bounds) > MOST_STALLED and bounds[-1] - bounds[-1 - MOST_STALLED] < LEAST_RISE * bounds[-1]
        is_close = relative_gap(incumbent.seconds, bounds[-1]) <= CLOSE
        if is_exact or stalls or is_close or time.monotonic() > ends:
            break
    _offer_exact(work, relaxed, weights, bounds[-1], ends)
    return bounds[-1]


def _offer_exact(work: SearchPhases, relaxed: RelaxedModel, weights: Floats, bound: float, ends: float) -> None:
    """Offer plans of reshards with exact prices: the best one, and better ones while those around it are priced."""
    last = np.inf
    while True:
        value, chosen = relaxed.least(weights, exact_only=True)
        if not value < last:
            return
        plan = plan_of(relaxed.model, relaxed.settled(chosen, weights))
        if work.incumbent.may_improve(plan):
            work.offer(plan)
        is_better = last - value > LEAST_RISE * abs(value)
        is_close = relative_gap(work.incumbent.seconds, bound) <= CLOSE
        if not is_better or is_close or time.monotonic() > ends:
            return
        last = value
        relaxed.price(chosen, weights, around=True)


def _with_room(hinges: Hinges, multipliers: Floats) -> Floats:
    """Return multipliers, scaled where need be, at which a second of computing has no negative cost.

    Casts and copies are left out of lower bounds, as they only add to the cost.
    """
    slopes = multipliers @ hinges.slopes
    room = slopes[Sum.DEVICE] + min(slopes[Sum.FORWARD_ROOM], slopes[Sum.BACKWARD_ROOM])
    free = hinges.base[Sum.DEVICE]
    return multipliers if free + room >= 0.0 else multipliers * (free / -room)
