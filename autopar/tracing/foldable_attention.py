"""Attention that can run over a folded sequence: causal, in a window, of documents; rows and keys are one dim."""

from __future__ import annotations

from autopar.ir.analysis.contractions import ATTENTION
from autopar.ir.graph import NamedGraph
from autopar.ir.values import AttentionNote, Band, NamedNode
from autopar.rules.ops.documents import DOCUMENT_ATTENTION

__all__ = ["folded_attention_of"]


def folded_attention_of(graph: NamedGraph, node: NamedNode) -> tuple[str, int] | None:
    """Return the dim of the rows of causal attention, and its window, 0 without; None for other ops.

    Rows and keys are one dim of one extent. The window of documents is an argument of theirs.
    """
    if (
        node.op not in (ATTENTION, str(DOCUMENT_ATTENTION))
        or node.source != "table"
        or node.rule.random
        or node.attention is None
    ):
        return None
    query, key = (graph.tensors[name] for name in node.operands[:2] if name is not None)
    rows, keys = (one.shape[-2] if len(one.shape) > 1 else 0 for one in (query, key))
    dim = query.dims[-2] if len(query.shape) > 1 else ""
    if rows != keys or dim != key.dims[-2]:
        return None
    window = _window(node.attention) if node.op == ATTENTION else 0
    return None if window is None else (dim, window)


def _window(note: AttentionNote) -> int | None:
    if note.mask == "causal":
        return 0
    band = note.band
    # Other notes name a reason for which the mask must stay.
    if note.mask.startswith("window") and isinstance(band, Band) and band.left is not None and band.right == 0:
        return band.left + 1
    return None
