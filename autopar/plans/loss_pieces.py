"""The loss of a plan in pieces: as its layout says, or where whole logits take a good part of the memory."""

from __future__ import annotations

from autopar.ir.graph import NamedGraph
from autopar.plans.folded import in_order
from autopar.plans.group_capacity import in_slots
from autopar.sharding.layout.language import Layout
from autopar.sharding.layout.pieces_statement import PiecesStatement
from autopar.sharding.layout.source import layout_error
from autopar.sharding.options import Outputs
from autopar.tracing.loss_in_pieces import NoPieces, logits_bytes, loss_in_pieces

__all__ = ["in_pieces", "pieces_statement", "pieces_that_pay", "stated_graph"]

# Share of the memory limit in one rank's part of the logits in float32, from which on a search tries pieces. About four
# tensors of this size live at once.
LEAST_SHARE = 0.02
# Share of the limit that the logits of one piece take at most. The gradient of the weight is added up once a piece, so
# there are no more pieces than that takes.
PIECE_SHARE = 1 / 128
MOST_PIECES = 256


def in_pieces(graph: NamedGraph, layout: Layout, outputs: Outputs) -> NamedGraph:
    """Return the graph with the loss in the pieces that a layout states."""
    said = layout.pieces
    if said is None or said.count is None:
        return graph
    try:
        return loss_in_pieces(graph, said.count, outputs == "loss")
    except NoPieces as error:
        raise layout_error("E4", error.what, error.fix, said.span) from None


def stated_graph(graph: NamedGraph, layout: Layout, outputs: Outputs) -> NamedGraph:
    """Return the graph as a layout states it: capacity of experts, pieces of the loss, order of the sequence."""
    return in_order(in_pieces(in_slots(graph, layout), layout, outputs), layout, outputs)


def pieces_statement(graph: NamedGraph) -> tuple[PiecesStatement, ...]:
    """Return the statement of the pieces of a graph's loss; none for whole logits."""
    return () if graph.loss_pieces is None else (PiecesStatement(graph.loss_pieces),)


def pieces_that_pay(graph: NamedGraph, ranks: int, limit_bytes: float, outputs: Outputs) -> NamedGraph | None:
    """Return the graph with its loss in pieces, if whole logits take a good part of a rank's memory; else None."""
    own = logits_bytes(graph) / ranks
    if own < LEAST_SHARE * limit_bytes or graph.fold is not None:
        return None
    pieces = 2
    while pieces < MOST_PIECES and own / pieces > PIECE_SHARE * limit_bytes:
        pieces *= 2
    try:
        return loss_in_pieces(graph, pieces, outputs == "loss")
    except NoPieces:
        return None
