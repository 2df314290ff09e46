"""Names for dims of inputs, and for dims beside named ones."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.tracing.naming.roles.structure import LOOKUPS, Proposal, Structure, op_name

__all__ = ["inputs", "tied"]


def inputs(structure: Structure) -> Iterator[Proposal]:
    """Name the dims of inputs: `batch` leads, unless it is split at once (the ends of edges).

    The second dim of ids is `seq`, and so are the dims between it and `d_model`.
    """
    for placeholder in structure.inputs:
        value = structure.values[placeholder.node]
        dims = structure.dims(placeholder.node)
        names = [structure.name(dim) for dim in dims]
        whole = value.dim() > 0 and structure.is_whole(placeholder.node, 0)
        if value.dim() >= 2 and not structure.space.parts(dims[0]) and "batch" not in names and not whole:
            yield dims[0], "batch"
        if value.dim() == 2 and not value.is_floating_point() and not whole:
            yield dims[1], "seq"
        if value.dim() == 3 and names[2] == "d_model" and "seq" not in names:
            yield dims[names[:2].index("batch") - 1 if "batch" in names else 1], "seq"
        if value.dim() == 1 and not value.is_floating_point() and structure.users.get(placeholder.node):
            lookup = any(op_name(user) in LOOKUPS for user in structure.users[placeholder.node])
            yield dims[0], "seq" if lookup else "batch"


def tied(structure: Structure) -> Iterator[Proposal]:
    """A dim kept apart from a named one (another extent, or the same tensor) takes its name too."""
    for _ in range(len(structure.binding.ties)):
        before = len(structure.names)
        for tie in structure.binding.ties:
            for dim, other in ((tie.first, tie.second), (tie.second, tie.first)):
                name = structure.name(other)
                known = structure.name(dim) is not None or structure.space.parts(dim) or structure.space.size(dim) == 1
                if name is not None and not known:
                    yield dim, name
        if len(structure.names) == before:
            return
