"""Plans that do not fit, with layers recomputed and parameters gathered again until they do.

A strategy says nothing of either. All layers are priced in each way first. Between a way that fits and a faster one
that does not, memory is about linear in the number of layers: as few layers as need be take the one that fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product

from autopar.cost.costs import Costs
from autopar.sharding.assignment import StepPlan
from autopar.sharding.layout.syntax import Recompute
from autopar.solver.search.phases import Incumbent

__all__ = ["offer_with_less_memory"]

# Pairs of ways that are mixed, and numbers of layers that are tried for each.
MOST_MIXED, MOST_COUNTS = 2, 3

# Recompute mode of a layer, and whether its parameters are gathered again in the backward.
Way = tuple[Recompute, bool]


def offer_with_less_memory(
    incumbent: Incumbent, name: str, plan: StepPlan, costs: Costs, is_late: Callable[[], bool] = lambda: False
) -> None:
    """Offer a plan that takes these costs in ways that take less memory, and the best mixtures of two ways."""
    setting, limit = incumbent.setting, incumbent.limit
    layers = list(setting.graph.ops_of_layers) if setting.trains else []
    if not layers or plan.recompute or plan.assignment.pipelining is not None:
        return
    every: dict[Way, Costs] = {("none", False): costs}
    # Those of least memory first: if none of a mode fits, neither does any that recomputes less.
    for mode, again in product(reversed(setting.modes), (True, False)):
        if (mode, again) in every:
            continue
        if is_late():
            return
        one = incumbent.offer(name, _in_ways(plan, dict.fromkeys(layers, (mode, again))))
        if one.fits_host:
            every[mode, again] = one
        if mode == "full" and min(each.limited_bytes for each in every.values()) > limit:
            return
    mixtures = []
    for fitting, faster in product(every, every):
        small, large = every[fitting], every[faster]
        if small.limited_bytes <= limit < large.limited_bytes and large.step_seconds < small.step_seconds:
            saved = (large.limited_bytes - small.limited_bytes) / len(layers)
            count = math.ceil((large.limited_bytes - limit) / saved)
            seconds = large.step_seconds + count / len(layers) * (small.step_seconds - large.step_seconds)
            mixtures.append((seconds, fitting, faster, count, saved))
    for seconds, fitting, faster, count, saved in sorted(mixtures)[:MOST_MIXED]:
        if seconds >= incumbent.seconds:
            return
        for _ in range(MOST_COUNTS):
            if is_late():
                return
            # The backwards of the first layers come last, when least is saved.
            ways = {path: fitting if number < count else faster for number, path in enumerate(layers)}
            found = incumbent.offer(name, _in_ways(plan, ways))
            count += max(1, math.ceil((found.limited_bytes - limit) / saved))
            if found.limited_bytes <= limit or count >= len(layers):
                break


def _in_ways(plan: StepPlan, ways: Mapping[str, Way]) -> StepPlan:
    """Return the plan with its layers in these ways."""
    again = tuple(f"{path}." for path, (_, is_again) in ways.items() if is_again)
    policies = {
        name: replace(policy, keep_gathered=False, regather=True) if name.startswith(again) else policy
        for name, policy in plan.assignment.gather_policies.items()
    }
    recompute = {path: mode for path, (mode, _) in ways.items() if mode != "none"}
    return replace(plan, assignment=replace(plan.assignment, gather_policies=policies)).with_recompute(recompute)
