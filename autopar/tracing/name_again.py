"""Names and rules of a graph that was made from a named one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch.fx import Graph, GraphModule

from autopar.ir.analysis.repeated_layers import repeated_layers
from autopar.ir.graph import NamedGraph
from autopar.ir.invariants import verifying
from autopar.ir.values import FOLD_PIECES, NamedTensor
from autopar.ir.verify import verify_graph
from autopar.rules.registry import rule_table
from autopar.tracing.naming.bind_graph import bind_graph
from autopar.tracing.naming.earlier_names import earlier_names
from autopar.tracing.trace import DISCOVERIES, assemble

__all__ = ["name_again"]


def name_again(
    graph: NamedGraph,
    made: Graph,
    made_from: Mapping[str, tuple[NamedTensor, bool]] | None = None,
    pieces_name: str = FOLD_PIECES,
    **stated: Any,
) -> NamedGraph:
    """Return the named graph of `made`, whose dims have their names in `graph`.

    `made_from` and `pieces_name` are those of `earlier_names`; by default each tensor is made from that of its node.
    `stated` has the fields that the change sets: `fold`, `loss_pieces`, `capacity`. The others stay.
    """
    if made_from is None:
        made_from = {tensor.node: (tensor, False) for tensor in graph.tensors.values()}
    exported = replace(graph.exported, graph_module=GraphModule(graph.exported.graph_module, made))
    binding = bind_graph(exported, rule_table(), DISCOVERIES)
    naming = earlier_names(graph, binding, made_from, pieces_name)
    found = assemble(graph.model, exported, binding, naming, repeated_layers(exported))
    kept = {"given": graph.given, "fold": graph.fold, "loss_pieces": graph.loss_pieces, "capacity": graph.capacity}
    found = replace(found, **{**kept, **stated})
    if verifying():
        verify_graph(found)
    return found
