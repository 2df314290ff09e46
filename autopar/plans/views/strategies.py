"""Published strategies priced beside a plan, each with its best assignment of axes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import product

from autopar.errors import AutoparError
from autopar.mesh import SubMesh
from autopar.plans.find import asked_as, under
from autopar.plans.plan import Plan
from autopar.sharding.layout.language import applies_to, axes_of, load_strategy, roles_of, strategy_names
from autopar.solver.strategies import WHOLE, splits_nothing

__all__ = ["experts_beside", "least_of"]


def experts_beside(plan: Plan) -> dict[str, Plan]:
    """Return a plan for each applicable strategy, fastest first; equal plans appear once, under the first name."""
    asked = asked_as(plan)
    used = plan.decided.axes.used
    found: dict[str, Plan] = {}
    for name in strategy_names():
        best: tuple[str, Plan] | None = None
        for call in _calls(name, used, plan.graph.dims):
            try:
                one = under(plan.graph, plan.mesh, call, asked, call)
            except AutoparError:
                continue  # it does not apply here
            if any(one.decided == other.decided for other in found.values()):
                continue
            if splits_nothing(one.decided):  # with all axes idle: not the best of this strategy, even if it is faster
                found[WHOLE] = one
            elif best is None or _rank(one) < _rank(best[1]):
                best = call, one
        if best is not None:
            found[best[0]] = best[1]
    return dict(sorted(found.items(), key=lambda item: _rank(item[1])))


def least_of(plan: Plan, experts: Mapping[str, Plan]) -> Plan:
    """Return the searched plan, or a faster strategy that fits: a search may run out of time to price it."""
    name = min((name for name, one in experts.items() if one.fits), key=lambda name: _rank(experts[name]), default=None)
    if name is None or plan.within_layout or experts[name].step_seconds >= plan.step_seconds:
        return plan
    return replace(experts[name], bound_seconds=plan.bound_seconds, origin=name, target=plan.target)


def _rank(plan: Plan) -> tuple[bool, float]:
    return not plan.fits, plan.step_seconds


def _calls(name: str, axes: SubMesh, dims: Iterable[str]) -> Iterator[str]:
    """Yield calls of a strategy, `fsdp(fsdp=dp*tp)`: equal names are matched, other axes assigned in every way.

    An axis of the strategy whose dims the model lacks gets none; where a strategy has one axis, some may be idle.
    """
    strategy = load_strategy(name)
    if not applies_to(strategy, dims):
        return
    own, roles = axes_of(strategy), roles_of(strategy, dims)
    options = [(axis,) if axis in roles and len(own) > 1 else roles for axis in axes]
    for dealt in product(*options):
        meaning = {role: [axis for axis, to in zip(axes, dealt, strict=True) if to == role] for role in own}
        given = ", ".join(f"{role}={'*'.join(dealt_to) or 'none'}" for role, dealt_to in meaning.items())
        yield f"{name}({given})"
