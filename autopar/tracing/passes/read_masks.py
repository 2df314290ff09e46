"""Replace attention masks that depend on the position alone by arguments of the kernel.

A mask is read as a function of row and column by `IndexReader`, exactly: the result holds for all rows and columns. A
mask that is True everywhere is dropped. `column <= row` becomes `is_causal`, which fast kernels need. Another band
stays an operand, and its width is recorded for the cost model. Any other mask stays, with the reason in the note.

Input::

    mask = arange(8)[None, :] <= arange(8)[:, None]
    y = scaled_dot_product_attention(q, k, v, attn_mask=mask)
Output::

    y = scaled_dot_product_attention(q, k, v, is_causal=True)    # note: causal
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from autopar.ir.values import AttentionNote, Band
from autopar.tracing.indices.piecewise import NEVER, Affine, Conjunction, Pieces, Shape, UnreadError, either, negation
from autopar.tracing.indices.reading import IndexReader
from autopar.tracing.passes.edit import arguments_of, set_attention_arguments

aten = torch.ops.aten

# Key of the `AttentionNote` in the meta of a node.
ATTENTION_NOTE = "attention"
# A score with less than this added has weight 0: a float32 exponential is 0 below -104.
HIDDEN = -1e4


def read_masks(graph: Graph, constants: Mapping[Node, Tensor], sources: Mapping[Node, str]) -> None:
    """Rewrite the calls of fused attention in place, and note the mask of each.

    `constants` have data that cannot change; `sources` has the user's name of each other placeholder.
    """
    # One reader for the graph: layers often share a mask, which is then read once.
    reader = IndexReader(constants, sources)
    for node in graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default):
        note, changed = _read(reader, node, arguments_of(node))
        if changed:
            set_attention_arguments(node, changed)
        node.meta[ATTENTION_NOTE] = note


def _read(reader: IndexReader, node: Node, arguments: Mapping[str, Any]) -> tuple[AttentionNote, dict[str, Any]]:
    """Return the note of a mask, and the arguments that replace it."""
    mask = arguments["attn_mask"]
    if not isinstance(mask, Node):
        return AttentionNote("causal" if arguments["is_causal"] else "no mask"), {}
    if arguments["is_causal"]:
        return AttentionNote("mask kept: it is given beside is_causal"), {}
    rows, columns = (arguments[name].meta["val"].shape[-2] for name in ("query", "key"))
    shape = (*mask.meta["val"].shape[:-2], rows, columns)
    try:
        band = band_of(reader.pieces(mask), shape)
    except UnreadError as error:
        return AttentionNote(f"mask kept: {error}"), {}
    text = _text(band)
    if text not in ("no mask", "causal"):
        return AttentionNote(text, band=band), {}
    # A mask can broadcast a batch dim into the result, which would be lost without it.
    query, key, value = (arguments[name].meta["val"] for name in ("query", "key", "value"))
    others = () if arguments["enable_gqa"] else (key.shape[:-2], value.shape[:-2])
    leading = torch.broadcast_shapes(query.shape[:-2], *others)  # type: ignore[no-untyped-call]
    if tuple(node.meta["val"].shape[:-2]) != tuple(leading):
        return AttentionNote(f"mask kept: {text}, but the result has its leading dims", band=band), {}
    return AttentionNote(text), {"attn_mask": None, "is_causal": text == "causal"}


def _text(band: Band) -> str:
    if band == Band(None, None):
        return "no mask"
    if band == Band(None, 0):
        return "causal"
    if band.left is not None and band.right == 0:
        return f"window {band.left + 1}"
    left, right = (("all" if end is None else str(end)) for end in (band.left, band.right))
    return f"window of {left} before and {right} after"


def band_of(mask: Pieces, shape: Shape) -> Band:
    """Return the band of a mask, boolean or added to the scores."""
    seen, hidden = NEVER, NEVER
    for term, predicate in mask:
        number = term.constant if isinstance(term, Affine) and not term.coefficients else term
        if isinstance(number, Affine):
            raise UnreadError("adds a bias that depends on the position")
        if number is True or (number is not False and number == 0):
            seen = either(seen, predicate, shape)
        elif number is False or number < HIDDEN:
            hidden = either(hidden, predicate, shape)
        else:
            raise UnreadError(f"adds {number:g} to scores")
    if not hidden:
        return Band(None, None)
    # The complement of the hidden cells can be one conjunction where the pieces of the visible ones are several.
    for visible in (seen, negation(hidden, shape)):
        if len(visible) == 1:
            return _band(next(iter(visible)), shape)
    raise UnreadError("rows see more than one stretch of columns" if seen else "rows see nothing")


def _band(visible: Conjunction, shape: Shape) -> Band:
    """Return the bounds of `column - row` as a band; dims -2 and -1 are row and column."""
    left = right = None
    for affine in visible:
        times = dict(affine.coefficients)
        if set(times) - {-1, -2}:
            raise UnreadError("depends on the place in the batch or on the head")
        row, column = times.get(-2, 0), times.get(-1, 0)
        # Coefficients are 1 and -1; one is missing only where its dim has extent 1.
        fits = abs(row - column) == 2 - (row == 0) - (column == 0) and row * column <= 0
        if not fits or (row == 0 and shape[-2] > 1) or (column == 0 and shape[-1] > 1):
            raise UnreadError("rows see columns that do not move with them")
        if row > 0 or column < 0:
            right = affine.constant if right is None else min(right, affine.constant)
        else:
            left = affine.constant if left is None else min(left, affine.constant)
    return Band(left, right)
