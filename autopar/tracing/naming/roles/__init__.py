"""Name dims by their role in the graph, such as `heads`; names of parameters are not read.

Each detector reads the bound graph and yields `(class of dims, name)`. `standard_names` runs the detectors in order,
and the first name of a class stays. A detector sees all names so far, its own included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from autopar.ir.exported import Exported
from autopar.tracing.naming.bind_graph import BoundGraph
from autopar.tracing.naming.roles.attention import attention, head_dims, head_parts
from autopar.tracing.naming.roles.inputs import channels, images, inputs, spread_by_ties
from autopar.tracing.naming.roles.streams import around_heads, layers, low_ranks, streams
from autopar.tracing.naming.roles.structure import Proposal, Structure
from autopar.tracing.naming.roles.tables import experts, tables, untied_heads

# Sure patterns come first. `spread_by_ties` runs twice: streams and head_parts use the names that it spreads, and it
# spreads theirs. head_parts needs `d_model`; layers gives `d_ff` to dims that no other detector named.
DETECTORS: tuple[Callable[[Structure], Iterator[Proposal]], ...] = (
    tables,
    attention,
    head_dims,
    experts,
    untied_heads,
    images,
    spread_by_ties,
    streams,
    head_parts,
    around_heads,
    channels,
    low_ranks,
    layers,
    inputs,
    spread_by_ties,
)


def standard_names(exported: Exported, binding: BoundGraph, names: dict[int, str]) -> dict[int, str]:
    """Add the names of all detectors to `names` (class -> name); names in it stay."""
    structure = Structure(exported, binding, dict(names))
    for detector in DETECTORS:
        for dim, name in detector(structure):
            root = structure.space.find(dim)
            if root not in structure.names:
                structure.names[root] = name
    return structure.names
