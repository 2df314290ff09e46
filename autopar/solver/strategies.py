"""Plans of published strategies, for every assignment of their axes to the axes of the mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import product

from autopar.errors import LayoutError
from autopar.mesh import SubMesh
from autopar.sharding.assignment import StepPlan
from autopar.sharding.layout.language import Layout, applies_to, axes_of, load_strategy, roles_of, strategy_names
from autopar.sharding.propagation import PropagationCache, propagate_plan
from autopar.solver.setting import PlanningProblem

__all__ = ["WHOLE", "axis_assignments", "splits_nothing", "strategy_plans"]

# Name of a plan in which every device does everything, whichever strategy produced it.
WHOLE = "a layout that splits nothing"


def splits_nothing(plan: StepPlan) -> bool:
    """Return whether every device stores and computes everything."""
    assignment = plan.assignment
    held = any(any(layout.splits) for layout in assignment.stored.values())
    return not held and not any(op.choice.splits for op in assignment.ops.values())


def strategy_plans(
    setting: PlanningProblem, is_late: Callable[[], bool] = lambda: False
) -> Iterator[tuple[str, StepPlan]]:
    """Yield the plan of every strategy that applies, named with its axes; equal plans once.

    Strategies with few axes come first, as the others have many assignments. `is_late` is called before each
    assignment and ends the walk: finding that one does not apply takes as long as finding that it does.
    """
    known = PropagationCache()
    found: list[StepPlan] = []
    loaded = {name: load_strategy(name) for name in strategy_names()}
    strategies = {name: strategy for name, strategy in loaded.items() if applies_to(strategy, setting.graph.dims)}
    for name, strategy in sorted(strategies.items(), key=lambda item: len(axes_of(item[1]))):
        for meaning in axis_assignments(strategy, setting.used, setting.graph.dims):
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


def axis_assignments(
    strategy: Layout, axes: SubMesh, dims: Iterable[str], match_names: bool = False
) -> Iterator[dict[str, tuple[str, ...]]]:
    """Yield the mesh axes of each strategy axis, in every way; several may serve one, in the order of the mesh.

    An axis of the strategy whose dims the model lacks gets none. With `match_names`, a mesh axis named like an axis of
    the strategy serves that one; a strategy of one axis may leave mesh axes idle.
    """
    own, roles = axes_of(strategy), roles_of(strategy, dims)
    options = [(axis,) if match_names and axis in roles and len(own) > 1 else roles for axis in axes]
    for dealt in product(*options):
        yield {role: tuple(axis for axis, to in zip(axes, dealt, strict=True) if to == role) for role in own}
