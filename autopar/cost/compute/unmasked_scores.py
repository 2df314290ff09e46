"""Share of the scores of attention that a kernel computes: it skips those that are masked by position."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.ir.values import NamedNode
from autopar.rules.ops.documents import DOCUMENT_ATTENTION
from autopar.rules.ops.folded import FOLDED_ATTENTION

__all__ = ["unmasked_share"]


def unmasked_share(node: NamedNode, sizes: Mapping[str, int]) -> float:
    """Return the share of the scores that the busiest shard computes; `sizes` are its extents of the factors."""
    if node.op == str(FOLDED_ATTENTION):
        return _folded_share(node)
    if node.op == str(DOCUMENT_ATTENTION):
        return _document_share(node, sizes)
    # The kernel skips masked scores for is_causal=True; with an explicit mask it computes all.
    return _causal_share(node, sizes) if "s" in dict(node.rule.lowerings) else 1.0


def _causal_share(node: NamedNode, sizes: Mapping[str, int]) -> float:
    """Return the share of unmasked scores in the busiest shard: query `i` attends to keys `0` to `i`."""
    rows, total = sizes["s"], node.sizes["s"]
    keys = node.sizes.get("t", total)
    if not rows or not keys:
        return 1.0
    # Later shards have more unmasked scores; the last shard may be shorter than the one before it.
    stop = total // rows * rows
    scores = max(_causal_scores(stop - rows, stop, keys), _causal_scores(stop, total, keys))
    return scores / (rows * keys)


def _folded_share(node: NamedNode) -> float:
    """Return the share of unmasked scores over a folded sequence, which all shards have alike."""
    keys = node.sizes["t"]
    band = None if node.attention is None else node.attention.band
    seen = keys if band is None or band.left is None else min(band.left + 1, keys)
    # The first `seen` rows are causal, all others see as many keys.
    return (_causal_scores(0, seen, keys) + (keys - seen) * seen) / keys**2 if keys else 1.0


def _document_share(node: NamedNode, sizes: Mapping[str, int]) -> float:
    """Return the share of the scores within documents; a shard has its part of them as of one causal document."""
    note = node.attention
    if note is None or note.band is None or note.band.right is None:
        return 1.0 if note is None or note.document_share is None else note.document_share
    share = _folded_share(node) if note.document_share is None else note.document_share
    # Over a fold all shards have alike.
    return share if "f" in node.sizes else share * _causal_share(node, sizes) / _causal_share(node, node.sizes)


def _causal_scores(start: int, stop: int, keys: int) -> int:
    """Return the unmasked scores of the queries from `start` to `stop`."""
    # Queries from `edge` on attend to all keys.
    edge = max(start, min(stop, keys))
    return (start + 1 + edge) * (edge - start) // 2 + (stop - edge) * keys
