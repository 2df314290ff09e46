"""Best plan on any mesh of a number of devices, from the shapes that a search proposes.

Estimates of shapes come from plans of one row on each rank. Where launches or messages take most of a step, they are
several times too high; meshes without stages are then searched by themselves as well.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

from autopar.errors import LayoutError
from autopar.mesh import Mesh
from autopar.plans.plan import Plan
from autopar.sharding.assignment import StepPlan
from autopar.sharding.layout.language import Layout
from autopar.solver.infeasible import NoFeasiblePlan
from autopar.solver.mesh_shape import Shape
from autopar.solver.shapes import ShapeSearch
from autopar.solver.solve import SolvedPlan
from autopar.solver.staged_plan import StagedPlan, plan_without_stages, with_bound

__all__ = ["best_of_shapes", "share_of"]

# A shape with stages is not followed if its estimate is this factor above the price of a plan.
ESTIMATE_ERROR = 1.01
# Where a row by itself takes this many times as long as in the batch, estimates of shapes are too high. A step that
# much longer than equal shares of the work leaves room for a faster one.
TOO_HIGH = 1.25

# The best plan on a mesh under a layout, found within some seconds; it has to be faster than others. The last number is
# that of the meshes among which the time is shared; the plan is one to begin from.
OnMesh = Callable[[Mesh, Layout | None, float, float, int, StepPlan | None], Plan]


def best_of_shapes(
    search: ShapeSearch, ends: float, on_mesh: OnMesh, plan_of: Callable[[SolvedPlan, Mesh], Plan]
) -> Plan | None:
    """Return the best plan of the proposed shapes, found until a time; None if none fits."""
    best: Plan | None = None
    staged: list[StagedPlan] = []
    beat, followed = math.inf, set[Mesh]()
    for priced in search.promising():
        left = max(1.0, ends - time.monotonic())
        mesh = _mesh_of(priced.shape)
        try:
            if priced.shape.stages > 1:
                if priced.seconds > ESTIMATE_ERROR * beat:
                    continue
                one = StagedPlan(search, priced)
                if one.fits:
                    staged.append(one)
                    beat = min(beat, one.likely_seconds)
                continue
            micro = priced.shape.micro
            if micro is None:
                followed.add(mesh)
            layout, first = None if micro is None else Layout((micro,)), plan_without_stages(search, priced)
            found = on_mesh(mesh, layout, left, beat, 1, first)
        except (NoFeasiblePlan, LayoutError):
            continue
        if found.step_seconds < beat:
            best, beat = replace(found, within_layout=False), found.step_seconds
    if search.row_factor > TOO_HIGH and math.inf > beat > TOO_HIGH * search.ideal_seconds:
        meshes = [mesh for shape in search.alone() if (mesh := _mesh_of(shape)) not in followed]
        best = _best_by_itself(meshes, best, beat, ends, on_mesh)
    if staged:
        shortest = min(staged, key=lambda one: one.likely_seconds)
        if best is None or shortest.likely_seconds < best.step_seconds:
            shortest.improved()
        priced, solved = min(((one.priced, one.solved) for one in staged), key=lambda one: one[1].costs.step_seconds)
        if best is None or solved.costs.step_seconds < best.step_seconds:
            return plan_of(with_bound(search, priced, solved), _mesh_of(priced.shape))
    return best


def share_of(left: float, searches: int) -> float:
    """Return the seconds of the next of some searches, the likeliest of which comes first.

    Half of what is left: a search that is cut short finds published strategies alone. The others have what it leaves.
    """
    return left if searches == 1 else left / 2


def _best_by_itself(meshes: list[Mesh], best: Plan | None, beat: float, ends: float, on_mesh: OnMesh) -> Plan | None:
    """Return the best plan of some meshes if it is faster than one that was found."""
    for number, mesh in enumerate(meshes):
        left = ends - time.monotonic()
        if left <= 0.0:
            break
        try:
            found = on_mesh(mesh, None, share_of(left, len(meshes) - number), beat, len(meshes), None)
        except (NoFeasiblePlan, LayoutError):
            continue
        if found.step_seconds < beat:
            best, beat = replace(found, within_layout=False), found.step_seconds
    return best


def _mesh_of(shape: Shape) -> Mesh:
    return Mesh(",".join(f"{axis}={size}" for axis, size in shape.mesh.items()))
