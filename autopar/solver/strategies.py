"""The strategies of experts as plans: on every assignment of their axes to those of the mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product

from autopar.errors import LayoutError
from autopar.mesh import SubMesh
from autopar.sharding.assignment import StepPlan
from autopar.sharding.layout.language import Layout, applies_to, axes_of, load_strategy, roles_of, strategy_names
from autopar.sharding.propagation import PropagationCache, propagate_plan
from autopar.solver.setting import PlanningProblem

__all__ = ["WHOLE", "splits_nothing", "strategy_plans"]

WHOLE = "a layout that splits nothing"
"""What a plan is called in which every device does everything, by whatever strategy it came about."""


def splits_nothing(plan: StepPlan) -> bool:
    """Whether every device holds and does everything."""
    assignment = plan.assignment
    held = any(any(layout.splits) for layout in assignment.stored.values())
    return not held and not any(op.choice.splits for op in assignment.ops.values())


def strategy_plans(
    setting: PlanningProblem, is_late: Callable[[], bool] = lambda: False
) -> Iterator[tuple[str, StepPlan]]:
    """Every strategy that applies, by what it is called with its axes; those that come to the same once.

    Those with the fewest axes come first, as the others have many assignments. It ends when `is_late` says so, which is
    asked before each assignment: to find that one does not apply takes as long as to find that it does.
    """
    known = PropagationCache()
    found: list[StepPlan] = []
    loaded = {name: load_strategy(name) for name in strategy_names()}
    strategies = {name: strategy for name, strategy in loaded.items() if applies_to(strategy, setting.graph.dims)}
    for name, strategy in sorted(strategies.items(), key=lambda item: len(axes_of(item[1]))):
        for meaning in _assignments(axes_of(strategy), roles_of(strategy, setting.graph.dims), setting.used):
            if is_late():
                return
            layout = strategy.on_axes(meaning)
            plan = plan_under(setting, layout, known)
            if plan is not None and not any(plan.assignment is other.assignment for other in found):
                found.append(plan)
                given = ", ".join(f"{axis}={'*'.join(own)}" for axis, own in meaning.items() if own)
                called = WHOLE if splits_nothing(plan) else f"{name}({given})"
                yield called, plan.with_options(setting.options)


def plan_under(setting: PlanningProblem, layout: Layout, known: PropagationCache | None = None) -> StepPlan | None:
    try:
        return propagate_plan(setting.graph, layout, setting.axes, known)
    except LayoutError:
        return None


def _assignments(
    own: tuple[str, ...], roles: tuple[str, ...], axes: SubMesh
) -> Iterator[Mapping[str, tuple[str, ...]]]:
    """Give each axis of the mesh one of these roles; several may serve one of the strategy's, in the mesh's order."""
    for dealt in product(roles, repeat=len(axes)):
        yield {name: tuple(axis for axis, to in zip(axes, dealt, strict=True) if to == name) for name in own}
