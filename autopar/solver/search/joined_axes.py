"""Meshes of three axes and more: neighbouring axes are first joined, then separated.

With every axis more, an op has several times as many choices, and reshards between them would have to be priced for
all pairs. So the mesh is first searched as one of two axes, for every way to join neighbours. The best plans of these
searches give, for every op and axis, the roles of the axis. The search of the whole mesh takes all combinations of
these roles.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from autopar.ir.values import NamedNode
from autopar.mesh import SubMesh
from autopar.sharding.assignment import OpAssignment, StepPlan
from autopar.sharding.choices import Choice, Passing, Site
from autopar.sharding.sharding import Sharding
from autopar.solver.setting import PlanningProblem

__all__ = ["MOST_AXES", "AxisRoles", "JoinedAxes", "joined_meshes", "kind_of", "ways_of"]

# Meshes of up to this many axes are searched directly.
MOST_AXES = 2


@dataclass(frozen=True)
class JoinedAxes:
    """Mesh with some neighbouring axes joined: by the name of a joined axis, the axes that it stands for."""

    setting: PlanningProblem
    axes: Mapping[str, tuple[str, ...]]

    def spread(self, plan: StepPlan) -> StepPlan:
        """Return the same plan on the mesh with separate axes."""
        assignment = plan.assignment
        made = replace(
            assignment,
            axes=self.setting.axes,
            stored={name: self._layout(layout) for name, layout in assignment.stored.items()},
            values={name: self._layout(layout) for name, layout in assignment.values.items()},
            ops={name: self._op(op_assignment) for name, op_assignment in assignment.ops.items()},
        )
        return replace(plan, assignment=made).with_options(self.setting.options)

    def _op(self, op_assignment: OpAssignment) -> OpAssignment:
        return OpAssignment(
            Choice(
                tuple((site, self._each(axes)) for site, axes in op_assignment.choice.splits),
                tuple(
                    (axis, passing) for joined, passing in op_assignment.choice.passes for axis in self._each((joined,))
                ),
            ),
            tuple(map(self._layout_or_none, op_assignment.operands)),
            tuple(map(self._layout_or_none, op_assignment.produced)),
            tuple(map(self._layout_or_none, op_assignment.results)),
        )

    def _layout_or_none(self, layout: Sharding | None) -> Sharding | None:
        return None if layout is None else self._layout(layout)

    def _layout(self, layout: Sharding) -> Sharding:
        return Sharding(
            tuple(map(self._each, layout.splits)),
            frozenset(self._each(layout.partial)),
            frozenset(self._each(layout.broadcast)),
        )

    def _each(self, axes: Iterable[str]) -> tuple[str, ...]:
        return tuple(own for axis in axes for own in self.axes[axis])


def joined_meshes(setting: PlanningProblem) -> Iterator[tuple[JoinedAxes, PlanningProblem]]:
    """Yield the mesh as one of two axes, in every way; axes on different links are not joined."""
    names = list(setting.axes)
    used = [names.index(axis) for axis in setting.used]
    for cut in used[1:]:
        groups = tuple(names[:cut]), tuple(names[cut:])
        links = [{setting.options.links.get(axis) for axis in group if axis in setting.used} for group in groups]
        if any(len(found) > 1 for found in links):
            continue
        axes = {"*".join(group): group for group in groups}
        sizes = SubMesh({name: prod(setting.axes[axis] for axis in group) for name, group in axes.items()})
        put = {name: link for name, found in zip(axes, links, strict=True) for link in found if link is not None}
        options, call = replace(setting.options, links=put), setting.call
        if call is not None and call.pipelining is not None:
            whole = _joined(call.pipelining.mesh, axes)
            if whole is None:
                continue
            call = replace(call, pipelining=replace(call.pipelining, mesh=whole))
        yield (
            JoinedAxes(setting, axes),
            PlanningProblem.of(setting.graph, sizes, setting.whole_cluster or setting.cluster, options, call),
        )


def _joined(mesh: SubMesh, axes: Mapping[str, tuple[str, ...]]) -> SubMesh | None:
    """Return a mesh with some axes joined; None if the axis of the stages lies between them."""
    names, joined = list(mesh), {own[0]: name for name, own in axes.items()}
    for own in axes.values():
        if [names.index(axis) for axis in own] != list(range(names.index(own[0]), names.index(own[0]) + len(own))):
            return None
    inner = {axis for own in axes.values() for axis in own[1:]}
    sizes = {}
    for axis in (axis for axis in names if axis not in inner):
        name = joined.get(axis, axis)
        sizes[name] = prod(mesh[each] for each in axes.get(name, (axis,)))
    return SubMesh(sizes)


@dataclass(frozen=True)
class AxisRoles:
    """Roles of an axis in the plans found, by kind of op and axis."""

    sites: Mapping[Any, Mapping[str, tuple[Site, ...]]] = field(default_factory=dict)
    passes: Mapping[Any, Mapping[str, tuple[Passing, ...]]] = field(default_factory=dict)


def kind_of(node: NamedNode) -> Any:
    """Ops of one kind have the same choices."""
    return node.op, str(node.rule), tuple(node.atoms.items())


def ways_of(setting: PlanningProblem, plans: Sequence[StepPlan]) -> AxisRoles:
    sites: dict[Any, dict[str, dict[Site, None]]] = {}
    passes: dict[Any, dict[str, dict[Passing, None]]] = {}
    for node in setting.graph.nodes:
        kind = kind_of(node)
        of_sites, of_passes = sites.setdefault(kind, {}), passes.setdefault(kind, {})
        for plan in plans:
            choice = plan.assignment.ops[node.name].choice
            for site, axes in choice.splits:
                for axis in axes:
                    of_sites.setdefault(axis, {})[site] = None
            for axis, passing in choice.passes:
                of_passes.setdefault(axis, {})[passing] = None
    return AxisRoles(
        {kind: {axis: tuple(found) for axis, found in each.items()} for kind, each in sites.items()},
        {kind: {axis: tuple(found) for axis, found in each.items()} for kind, each in passes.items()},
    )
