"""Compute the loss of all rows where a model cuts off the last ones, and ignore the targets of those rows.

A slice of activations along the sequence keeps the sequence whole: shards of it would be of other lengths. A target
that is ignored costs nothing, and its row has a zero gradient. Rows before the first target are treated alike.

Input::

    loss = cross_entropy(reshape(slice(logits, 1, 0, -1)), reshape(target))
Output::

    loss = cross_entropy(reshape(logits), reshape(pad(target, (0, 1), ignore_index)))
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from autopar.tracing.passes.edit import arguments_of, insert

aten = torch.ops.aten
SLICE = aten.slice.Tensor
# Ops between the slice and the loss that treat each row alike; a reshape merges the leading dims.
ALIKE = (aten._to_copy.default, aten.clone.default)
# More rows than those with a target are computed, at most this multiple.
MOST_ROWS = 2


def whole_loss(graph: Graph) -> None:
    """Rewrite every loss over class indices whose rows are a slice of others."""
    for node in graph.find_nodes(op="call_function", target=aten.cross_entropy_loss.default):
        arguments = arguments_of(node)
        target = arguments["target"]
        # A loss for each row has as many results as targets.
        if target.meta["val"].dtype.is_floating_point or arguments["reduction"] == NO_REDUCTION:
            continue
        chain = _chain_to_slice(arguments["self"])
        if chain is not None:
            _rewrite(node, arguments, chain)


NO_REDUCTION = 0


def _chain_to_slice(node: Node) -> list[Node] | None:
    """Return the ops from a slice of rows to the loss, the slice first; None without one."""
    chain = [node]
    while chain[0].target in ALIKE or chain[0].target is aten.reshape.default:
        source = chain[0].args[0]
        if not isinstance(source, Node) or source.op != "call_function":
            return None
        if chain[0].target is aten.reshape.default and not _merges_rows(chain[0], source):
            return None
        chain.insert(0, source)
    return chain if _cuts_rows(chain[0]) else None


def _merges_rows(node: Node, source: Node) -> bool:
    before, after = (one.meta["val"].shape for one in (source, node))
    return before[-1:] == after[-1:] and (len(after) == 2 or before == after)


def _cuts_rows(node: Node) -> bool:
    """Return whether a node takes a stretch of the rows of scores, the dim before the classes."""
    if node.target is not SLICE:
        return False
    given, source = arguments_of(node), node.args[0]
    assert isinstance(source, Node), node
    shape = source.meta["val"].shape
    rows = len(shape) - 2
    if rows < 0 or given["dim"] % len(shape) != rows or given["step"] != 1:
        return False
    kept = node.meta["val"].shape[rows]
    return bool(kept < shape[rows] <= MOST_ROWS * kept)


def _rewrite(node: Node, arguments: dict[str, Any], chain: list[Node]) -> None:
    cut, *others = chain
    source = cut.args[0]
    assert isinstance(source, Node), cut
    whole, kept = source.meta["val"].shape, cut.meta["val"].shape
    target = _with_rows(arguments["target"], kept[:-1])
    if target is None:
        return
    # Negative bounds count from the end; bounds beyond it are those of the dim.
    first, *_ = slice(arguments_of(cut)["start"], None).indices(whole[-2])
    padding = [first, whole[-2] - first - kept[-2]]
    made = insert(node, aten.constant_pad_nd.default, target, padding, arguments["ignore_index"])
    scores = source
    for other in others:
        if other.target is aten.reshape.default:
            is_merged = len(other.meta["val"].shape) == 2
            shape = [whole[:-1].numel(), whole[-1]] if is_merged else list(whole)
            scores = insert(other, aten.reshape.default, scores, shape, before=node)
        else:
            scores = insert(other, other.target, scores, *other.args[1:], before=node, **other.kwargs)
    rows = list(scores.meta["val"].shape[:-1])
    if list(made.meta["val"].shape) != rows:
        made = insert(node, aten.reshape.default, made, rows)
    node.args = (scores, made, *node.args[2:])


def _with_rows(target: Node, shape: tuple[int, ...]) -> Node | None:
    """Return the targets in the shape of the rows before they are merged; None if they are not merged from it."""
    while tuple(target.meta["val"].shape) != tuple(shape):
        source = target.args[0] if target.args else None
        passes = target.target in (*ALIKE, aten.reshape.default)
        if not passes or not isinstance(source, Node) or source.meta["val"].numel() != target.meta["val"].numel():
            return None
        if source.meta["val"].dtype != target.meta["val"].dtype:
            return None
        target = source
    return target
