"""The order of the sequence of a plan: as its layout says, or where a fold pays."""

from __future__ import annotations

from collections import defaultdict
from math import prod

from autopar.cost.compute.unmasked_scores import unmasked_share
from autopar.ir.analysis.contractions import ATTENTION, contractions
from autopar.ir.graph import NamedGraph
from autopar.ir.values import NamedNode, SequenceFold
from autopar.rules.ops.documents import DOCUMENT_ATTENTION
from autopar.sharding.layout.fold_statement import PIECES, FoldStatement
from autopar.sharding.layout.language import Layout
from autopar.sharding.layout.source import layout_error, unknown_name
from autopar.sharding.options import Outputs
from autopar.tracing.fold_sequence import CannotFold, fold_sequence, unfolded_activations
from autopar.tracing.foldable_attention import folded_attention_of

__all__ = ["fold_statement", "fold_that_pays", "in_order"]

# Share of causal attention in the FLOPs of a model, from which on a search tries the fold: it has half of its time for
# each order. Shorter sequences move the split to heads for attention, at a price that does not pay for two searches.
LEAST_SHARE = 0.2
# Documents of unlike lengths have as much work on each shard if it has a part of many pieces. Short pieces make calls
# of a kernel with few rows.
DOCUMENT_PIECES = 16
LEAST_PIECE = 1024


def in_order(graph: NamedGraph, layout: Layout, outputs: Outputs) -> NamedGraph:
    """Return the graph in the order that a layout states."""
    wanted = layout.fold
    if wanted is None or wanted.pieces is None:
        return graph
    if wanted.dim not in graph.dims:
        raise unknown_name("dim", wanted.dim, graph.dims, wanted.span)
    try:
        return fold_sequence(graph, SequenceFold(wanted.dim, wanted.pieces), outputs == "loss")
    except CannotFold as error:
        raise layout_error("E4", error.what, error.fix, wanted.span) from None


def fold_statement(graph: NamedGraph) -> tuple[FoldStatement, ...]:
    """Return the statement of the order of a graph; none for the plain one."""
    return () if graph.fold is None else (FoldStatement(*graph.fold),)


def fold_that_pays(graph: NamedGraph, outputs: Outputs) -> NamedGraph | None:
    """Return the folded graph of a model that spends a good part of its FLOPs in causal attention; else None."""
    if graph.fold is not None:
        return None
    causal: dict[str, float] = defaultdict(float)
    packed: set[str] = set()
    others = 0.0
    for node in graph.nodes:
        found = folded_attention_of(graph, node)
        if found is not None:
            is_packed = node.op == str(DOCUMENT_ATTENTION)
            causal[found[0]] += _scores(node) * (2 * unmasked_share(node, node.sizes) if is_packed else 1)
            packed.update(found[:1] if is_packed else ())
        elif node.op == ATTENTION:
            others += _scores(node)
        else:
            others += sum(_products(node))
    dim = max(causal, key=causal.__getitem__, default="")
    # Half of the scores are unmasked. In the plain order a window needs a mask, and all scores are computed.
    if not dim or causal[dim] / 2 < LEAST_SHARE * (sum(causal.values()) / 2 + others):
        return None
    size = graph.dims[dim].size
    many = dim in packed and size % DOCUMENT_PIECES == 0 and size >= DOCUMENT_PIECES * LEAST_PIECE
    pieces = DOCUMENT_PIECES if many else PIECES
    try:
        folded = fold_sequence(graph, SequenceFold(dim, pieces), outputs == "loss")
    except CannotFold:
        return None
    return None if unfolded_activations(folded) else folded


def _scores(node: NamedNode) -> float:
    """Return the multiplications of attention, of all scores."""
    operands = node.rule.operands[:3]
    factors = {factor for operand in operands if operand is not None for factor in operand.factors}
    # Scores over the width of the keys, and over that of the values.
    shared = prod(node.sizes[factor] for factor in factors - {"e", "v"})
    return float(shared * (node.sizes.get("e", 1) + node.sizes.get("v", 1)))


def _products(node: NamedNode) -> list[float]:
    steps = contractions(node)
    return [float(prod(node.sizes[factor] for factor in step.left | step.right)) for step in steps]
