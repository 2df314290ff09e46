"""Plans on unequal devices: shares of the samples by speed, tried by the search and resolved in layouts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from autopar.cost.hardware.cluster import Cluster
from autopar.cost.unequal_devices import replica_speeds, speeds_along
from autopar.errors import LayoutError
from autopar.ir.graph import NamedGraph
from autopar.mesh import Shares, SubMesh
from autopar.sharding.assignment import StepPlan
from autopar.sharding.layout.language import Layout
from autopar.sharding.layout.syntax import SplitTerm, rules_of
from autopar.sharding.options import TrainingOptions
from autopar.sharding.pipelining import without_stages
from autopar.sharding.replicas import Drift
from autopar.sharding.shares import InfeasibleShares, asks_for_speed, by_numbers, marked, share_terms, shares_along
from autopar.solver import Progress
from autopar.solver.infeasible import NoFeasiblePlan
from autopar.solver.integer.choice import SolverChoice
from autopar.solver.solve import SolvedPlan, solve_plan

__all__ = ["solve_with_shares", "with_replica_speeds", "with_speeds"]

# Share of the time that the search of even shares has, however long the first one took.
LEAST_SHARE = 0.1


def with_speeds(graph: NamedGraph, layout: Layout, axes: SubMesh, cluster: Cluster, links: Mapping[str, str]) -> Layout:
    """Return the layout with numbers for each `by speed`: the speeds of the cluster on this graph."""
    if not asks_for_speed(layout):
        return layout
    speeds: dict[str, tuple[float, ...]] = {}
    for rule, term in share_terms(layout):
        if term.by == "speed" and rule.dims[0] in graph.dims and all(axis in axes for axis in term.axes):
            speeds |= speeds_along(graph, rule.dims[0], term.axes, axes, cluster, links)
    micro = layout.micro_batches
    return by_numbers(graph, layout, axes, speeds, 1 if micro is None else micro.parts)


def with_replica_speeds(cluster: Cluster, graph: NamedGraph, drift: Drift, dim: str) -> Drift:
    """Return the replicas with numbers for `by speed`: the speeds of the cluster on the graph of the whole batch."""
    if drift.statement.by != "speed" or dim not in graph.dims:
        return drift
    return drift.with_speeds(graph.dims[dim].size, replica_speeds(graph, dim, drift, cluster))


def solve_with_shares(
    graph: NamedGraph,
    axes: SubMesh,
    cluster: Cluster,
    *,
    layout: Layout | None,
    memory_bytes: float | None,
    options: TrainingOptions,
    time_limit: float,
    progress: Callable[[Progress], None] | None,
    warm: Mapping[str, StepPlan],
    beat_seconds: float,
    solver: SolverChoice,
    until_one_fits: bool = True,
) -> SolvedPlan:
    """Search a plan; where devices are unequal, search with shares of the samples by speed and with even ones.

    Shares change no result, so the faster plan is taken.
    """
    began, best, refused = time.monotonic(), None, None
    said = layout or Layout(())
    shares = _own_shares(graph, said, axes, cluster, options)
    ways = (axes,) if shares is None else (axes.with_shares(shares), axes)
    for number, way in enumerate(ways):
        left = max(LEAST_SHARE * time_limit, began + time_limit - time.monotonic()) / (len(ways) - number)
        try:
            found = solve_plan(
                graph,
                way,
                cluster,
                layout=layout,
                memory_bytes=memory_bytes,
                options=options,
                time_limit=left,
                progress=progress,
                warm=warm if way.shares is None else {},
                beat_seconds=beat_seconds if best is None else min(beat_seconds, best.costs.step_seconds),
                solver=solver,
                until_one_fits=until_one_fits,
            )
        except (NoFeasiblePlan, LayoutError) as error:
            refused = error
            if best is None:
                continue
            # Even plans are slower, or take too much memory: then nothing is known of their times.
            is_slower = isinstance(error, NoFeasiblePlan) and error.least_bytes is None
            return best if is_slower else replace(best, bound_seconds=0.0)
        found = _without_idle_shares(graph, found)
        if best is None:
            best = found
        else:
            bound = min(best.bound_seconds, found.bound_seconds)
            best = replace(min(best, found, key=lambda one: one.costs.step_seconds), bound_seconds=bound)
    if best is None:
        assert refused is not None, "a search ends with a plan or an error"
        raise refused
    return best


def _without_idle_shares(graph: NamedGraph, found: SolvedPlan) -> SolvedPlan:
    """Return the plan without shares along axes that split no samples in it."""
    assignment = found.plan.assignment
    shares = assignment.axes.shares
    if shares is None:
        return found
    splits = (
        axis
        for node in marked(graph, shares.dim).nodes
        for site, over in assignment.ops[node.name].choice.splits
        if site in node.by_share
        for axis in over
    )
    kept = replace(assignment, axes=assignment.axes.with_shares(shares.along(splits)))
    return replace(found, plan=replace(found.plan, assignment=kept))


def _own_shares(
    graph: NamedGraph, layout: Layout, axes: SubMesh, cluster: Cluster, options: TrainingOptions
) -> Shares | None:
    """Return shares of the samples by speed along the axes that unequal devices lie along; None if there are none."""
    micro = layout.micro_batches or layout.open_micro_batches
    dim = "batch" if micro is None else micro.dim
    inside = [axis for axis, size in without_stages(layout, axes).items() if size > 1]
    if not cluster.part or dim not in graph.dims or any(True for _ in share_terms(layout)):
        return None
    # A rule about the dim says how it is split.
    terms = (term for one in layout for rule in rules_of(one) if dim in rule.dims for term in rule.place.terms)
    named = {axis for term in terms if isinstance(term, SplitTerm) for axis in term.axes}
    count = 1 if layout.micro_batches is None else layout.micro_batches.parts
    speeds = speeds_along(marked(graph, dim), dim, inside, axes, cluster, options.links)
    found: dict[str, tuple[int, ...]] = {}
    for axis in speeds.keys() - named:
        # Whole samples for each rank of the other axes, which may split them too; else for each place.
        others = tuple(other for other in inside if other != axis and other not in speeds)
        for over in ((axis, *others), (axis,)):
            try:
                weights = shares_along(graph, dim, over, axes, {axis: speeds[axis]}, count)
            except InfeasibleShares:
                continue
            found |= weights
            break
    return Shares(dim, tuple((axis, found[axis]) for axis in axes if axis in found)) if found else None
