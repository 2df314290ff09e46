"""Replicas along axes that drift: what one replica runs, on which part of the mesh and of the batch.

A replica is a whole plan on the mesh without these axes. Only the batch is cut over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import gcd

from autopar.errors import LayoutError
from autopar.ir.graph import NamedGraph
from autopar.mesh import Mesh, MeshAxis
from autopar.sharding.layout.drift import DriftStatement
from autopar.sharding.layout.language import Layout
from autopar.sharding.layout.source import SourceSpan, layout_error, unknown_name
from autopar.sharding.layout.syntax import CutStatement, Let, MeshStatement, PipelineStatement, Statement, named_axes
from autopar.sharding.shares import greedy

__all__ = ["Drift", "batch_dim_of", "batch_places", "check_batch", "split_replicas"]


# Rows of each rank, on average, from which on rows are shared out by as many as there are ranks.
MANY_UNITS = 8
WHOLE_NUMBERS = "give cluster= with its parts, or write numbers, as in 'drift pod -> mean every 0, by 12:4'"


@dataclass(frozen=True)
class Drift:
    """Replicas along the first axes of a mesh, and how they meet."""

    statement: DriftStatement
    # All axes: those of the replicas first, then those of one replica.
    mesh: Mesh
    # Micro-batches of a call that the layout states.
    micro_batches: int = field(default=1, compare=False)

    @property
    def axes(self) -> tuple[str, ...]:
        return self.statement.axes

    @property
    def replicas(self) -> int:
        return self.mesh.extent(*self.axes)

    @property
    def replica_mesh(self) -> Mesh:
        """Return the mesh of one replica; an axis of one rank where it has no other."""
        inner = tuple(axis for axis in self.mesh.declared if axis.name not in self.axes)
        return Mesh(inner or (MeshAxis(self.single_axis, 1, None),))

    @property
    def single_axis(self) -> str:
        """Return a name for the axis of a replica of one rank."""
        return next(name for name in ("replica", "replica_rank") if name not in self.axes)

    def rows(self, batch: int) -> tuple[int, ...]:
        """Return the rows of the batch for each replica, in whole rows."""
        by = self.statement.by
        assert by != "speed", "the cluster has given numbers"
        return greedy(batch, (1,) * self.replicas if by is None else by)

    def with_speeds(self, batch: int, speeds: Sequence[float]) -> Drift:
        """Return the replicas with numbers for `by speed`: rows such that all end a step at about the same time.

        Each rank of a replica has whole rows of each micro-batch, where there are enough of them.
        """
        unit = self.micro_batches * (self.mesh.size // self.replicas)
        if batch % unit or batch < MANY_UNITS * unit * self.replicas:
            unit = 1
        rows = greedy(batch // unit, speeds)
        by = tuple(one // gcd(*rows) for one in rows)
        return replace(self, statement=replace(self.statement, by=by if len(set(by)) > 1 else None))


def split_replicas(layout: Layout, mesh: Mesh) -> tuple[Layout, Drift | None]:
    """Return the layout of one replica, and the replicas that the layout states on a mesh."""
    statement = layout.drift
    if statement is None:
        return layout, None
    _check_axes(layout, statement, mesh)
    micro = layout.micro_batches
    drift = Drift(statement, mesh, 1 if micro is None else micro.parts)
    if statement.servers > drift.replicas:
        message = f"server({statement.servers}) needs a replica for each server, and there are {drift.replicas}"
        raise layout_error("E4", message, f"write 'server({drift.replicas})' or less", statement.span)
    by = statement.by
    if isinstance(by, tuple) and len(by) != drift.replicas:
        names = "*".join(statement.axes)
        message = f"'by {':'.join(map(str, by))}' has {len(by)} shares, and there are {drift.replicas} replicas"
        raise layout_error("E4", message, f"give a number for each replica along {names}", statement.span)
    kept = (_inside(one, drift) for one in layout if one is not statement)
    return Layout(tuple(one for one in kept if one is not None), layout.name), drift


def batch_dim_of(layout: Layout) -> str:
    """Return the name of the dim that replicas share, which a line about micro-batches may give."""
    micro = layout.micro_batches or layout.open_micro_batches
    return "batch" if micro is None else micro.dim


def batch_places(graph: NamedGraph, drift: Drift, dim: str) -> dict[str, tuple[int, int]]:
    """Return for each input with the batch its dim of the batch, and the extent of that dim for one row."""
    found = {}
    for name in graph.inputs:
        tensor = graph.tensors[name]
        for place, atom in enumerate(tensor.atoms):
            if dim not in atom.names:
                continue
            if any(other.dim == atom.dim for other in tensor.atoms[:place]):
                raise layout_error(
                    "E5",
                    f"the input {name} has the dim '{dim}' behind another one, so that replicas would get strided rows",
                    "give inputs whose first dim is the batch, or each rank its own rows with local_inputs=True",
                    drift.statement.span,
                )
            found[name] = atom.dim, tensor.shape[atom.dim] // atom.size
    if not found:
        raise layout_error(
            "E1",
            f"no input has the dim '{dim}', which the replicas along {'*'.join(drift.axes)} share",
            f"name it: dims={{INPUT: '{dim} ...'}}; or give each rank its own rows with local_inputs=True",
            drift.statement.span,
        )
    return found


def check_batch(drift: Drift, batch: int, dim: str = "batch") -> None:
    """Raise unless the replicas can share a batch."""
    names, by = "*".join(drift.axes), drift.statement.by
    if by == "speed":
        raise layout_error(
            "E5", f"the speeds of the replicas along {names} are unknown", WHOLE_NUMBERS, drift.statement.span
        )
    if by is not None and not all(drift.rows(batch)):
        shares = ":".join(map(str, drift.rows(batch)))
        message = f"{dim}={batch} in shares {shares} leaves a replica along {names} without a row"
        raise layout_error("E4", message, "give a larger batch, or other shares", drift.statement.span)
    if by is None and batch % drift.replicas:
        raise layout_error(
            "E4",
            f"{dim}={batch} does not divide over the {drift.replicas} replicas along {names}",
            f"give a batch that is a multiple of {drift.replicas}, or a share for each, as in 'by 12:4'; or each rank "
            "its own rows with local_inputs=True",
            drift.statement.span,
        )


def _check_axes(layout: Layout, statement: DriftStatement, mesh: Mesh) -> None:
    for axis in statement.axes:
        if axis not in mesh.names:
            place = None if statement.span is None else statement.span.at(axis)
            raise unknown_name("axis", axis, mesh.names, place)
    if mesh.names[: len(statement.axes)] != statement.axes:
        written = "*".join(statement.axes)
        rest = [str(axis) for axis in mesh.declared if axis.name not in statement.axes]
        first = ", ".join([*(str(mesh.declared[mesh.names.index(axis)]) for axis in statement.axes), *rest])
        raise layout_error(
            "E3",
            f"axis '{written}' drifts and must stand first in the mesh, so that a replica has consecutive ranks",
            f"write the mesh as '{first}'",
            statement.span,
        )
    for other in layout:
        for axis, span in _axes_of_tensors(other):
            if axis in statement.axes:
                raise _names_drift(axis, span)


def _axes_of_tensors(statement: Statement) -> tuple[tuple[str, SourceSpan | None], ...]:
    """Return the axes that a statement splits or sums tensors over, with their places."""
    if isinstance(statement, PipelineStatement | CutStatement):
        return ((statement.axis, statement.span),)
    if isinstance(statement, DriftStatement | Let | MeshStatement):
        return ()
    return tuple(named_axes(statement))


def _names_drift(axis: str, span: SourceSpan | None) -> LayoutError:
    return layout_error(
        "E3",
        f"axis '{axis}' drifts: replicas differ along it, so no tensor can be split or summed over it",
        f"leave '{axis}' out, or delete the 'drift' line; shares of the batch stand in that line, as in 'by 12:4'",
        None if span is None else span.at(axis),
    )


def _inside(statement: Statement, drift: Drift) -> Statement | None:
    """Return a statement as one replica has it; None if nothing is left of it."""
    if isinstance(statement, Let):  # its name is replaced in all other statements
        return None if set(statement.axes) & set(drift.axes) else statement
    if not isinstance(statement, MeshStatement):
        return statement
    fits = statement.mesh.names == drift.mesh.names and all(
        size in (None, drift.mesh.extent(axis)) for axis, size in statement.mesh.axes.items()
    )
    if not fits:
        message = f"the layout is for another mesh than the one it is to run on, {drift.mesh}"
        fix = f"write 'mesh {', '.join(map(str, drift.mesh.declared))}', or leave the line out"
        raise layout_error("E1", message, fix, statement.span)
    return replace(statement, mesh=drift.replica_mesh)
