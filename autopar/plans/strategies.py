"""Plans of published strategies beside the plan of a search."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from autopar.errors import AutoparError
from autopar.mesh import SubMesh
from autopar.plans.find import plan_under_layout, request_like
from autopar.plans.plan import Plan
from autopar.plans.replicas import with_meetings
from autopar.sharding.layout.language import applies_to, axes_of, load_strategy, strategy_names
from autopar.solver.published_strategies import WHOLE, axis_assignments, splits_nothing

__all__ = ["faster_strategy", "price_strategies"]


def price_strategies(plan: Plan) -> dict[str, Plan]:
    """Return a plan for each applicable strategy, fastest first; equal plans appear once, under the first name."""
    request = request_like(plan)
    used = plan.mesh.whole.used
    found: dict[str, Plan] = {}
    # Of equal plans that of the strategy with the fewest axes counts.
    for name in sorted(strategy_names(), key=lambda name: len(axes_of(load_strategy(name)))):
        best: tuple[str, Plan] | None = None
        for call in _calls(name, used, plan.graph.dims):
            try:
                one = with_meetings(plan_under_layout(plan.graph, plan.mesh, call, request, call), plan.decided.drift)
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


def faster_strategy(plan: Plan, experts: Mapping[str, Plan]) -> Plan:
    """Return the searched plan, or a faster strategy that fits: a search may run out of time to price it."""
    name = min((name for name, one in experts.items() if one.fits), key=lambda name: _rank(experts[name]), default=None)
    if name is None or plan.within_layout or experts[name].step_seconds >= plan.step_seconds:
        return plan
    return replace(
        experts[name], bound_seconds=plan.bound_seconds, bound_by=plan.bound_by, origin=name, target=plan.target
    )


def _rank(plan: Plan) -> tuple[bool, float]:
    return not plan.fits, plan.step_seconds


def _calls(name: str, axes: SubMesh, dims: Iterable[str]) -> Iterator[str]:
    """Yield calls of a strategy, `fsdp(fsdp=dp*tp)`: equal names are matched, other axes assigned in every way.

    An axis of the strategy whose dims the model lacks gets none; where a strategy has one axis, some may be idle.
    """
    strategy = load_strategy(name)
    # Meetings change what is learned, so replicas that drift are no way to run the same training.
    if not applies_to(strategy, dims) or strategy.drift is not None:
        return
    for meaning in axis_assignments(strategy, axes, dims, match_names=True):
        given = ", ".join(f"{role}={'*'.join(own) or 'none'}" for role, own in meaning.items())
        yield f"{name}({given})"
