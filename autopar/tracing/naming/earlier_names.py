"""Names of the dims of a graph that was made from another one: those of the same tensors there."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from autopar.ir.graph import NamedGraph
from autopar.ir.values import FOLD_PIECES, NamedTensor
from autopar.tracing.naming.bind_graph import BoundGraph
from autopar.tracing.naming.name_dims import DimNames

__all__ = ["earlier_names"]


def earlier_names(
    graph: NamedGraph,
    binding: BoundGraph,
    made_from: Mapping[str, tuple[NamedTensor, bool]],
    pieces_name: str = FOLD_PIECES,
) -> DimNames:
    """Return the names that the dims of a graph have in the one before.

    `made_from` has, by node, the tensor of `graph` and whether it has the folded order now. The parts of a folded dim
    have the names `pieces_name` and the dim. A tensor without an earlier one shares its dims with others.
    """
    names: dict[int, str] = {}
    pieces: set[int] = set()
    for key, dims in binding.dims.items():
        if key not in made_from:
            continue
        tensor, folded = made_from[key]
        for place, dim in enumerate(dims):
            classes = list(binding.space.atoms(dim))
            within: dict[str, list[int]] = {}
            for atom in (atom for atom in tensor.atoms if atom.dim == place):
                own = [classes.pop(0)]
                while prod(map(binding.space.size, own)) < atom.size:
                    own.append(classes.pop(0))
                if len(own) == 2:
                    # Plain the positions within a piece are major, so that a shard is contiguous.
                    piece, positions = own if folded else reversed(own)
                    suffix = "".join(atom.names[-1].partition(".")[1:])
                    names.setdefault(piece, f"{pieces_name}{suffix}")
                    names.setdefault(positions, atom.names[-1])
                    pieces.add(piece)
                elif atom.names:
                    names.setdefault(own[0], atom.names[-1])
                for outer in atom.names[:-1]:
                    within.setdefault(outer, []).extend(own)
            for part in binding.space.within(dim):
                inside = list(binding.space.atoms(part))
                names.update((part, outer) for outer, own in within.items() if inside == own)
    known = {name: dim.source for name, dim in graph.dims.items()}
    sources = {dim: known.get(name, "structure") for dim, name in names.items()}
    return DimNames(binding, names, sources, frozenset(pieces))
