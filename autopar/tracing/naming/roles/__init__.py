"""Names by structure: what role a dim plays is read off the graph, not off the names of parameters.

Each detector looks at the bound graph and yields `(class of dims, name)`. `standard_names` asks them in order; the
first name a class is given stays. A detector sees the names given so far, its own included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from autopar.ir.exported import Exported
from autopar.tracing.naming.bind_graph import BoundGraph
from autopar.tracing.naming.roles.attention import attention, head_dims, head_parts
from autopar.tracing.naming.roles.experts import experts
from autopar.tracing.naming.roles.images import channels, images
from autopar.tracing.naming.roles.leftovers import inputs, tied
from autopar.tracing.naming.roles.streams import around_heads, layers, low_ranks, streams
from autopar.tracing.naming.roles.structure import Proposal, Structure
from autopar.tracing.naming.roles.tables import tables, untied_heads

__all__ = ["standard_names"]

DETECTORS: tuple[Callable[[Structure], Iterator[Proposal]], ...] = (
    tables,
    attention,
    head_dims,
    experts,
    untied_heads,
    images,
    tied,
    streams,
    head_parts,
    around_heads,
    channels,
    low_ranks,
    layers,
    inputs,
    tied,
)


def standard_names(exported: Exported, binding: BoundGraph, names: dict[int, str]) -> dict[int, str]:
    """Add the standard names that the structure shows to `names` (class -> name); given names stay."""
    structure = Structure(exported, binding, dict(names))
    for detector in DETECTORS:
        for dim, name in detector(structure):
            root = structure.space.find(dim)
            if root not in structure.names:
                structure.names[root] = name
    return structure.names
