"""Masks of fused attention that say nothing but the position: an argument of the kernel instead of a tensor.

A mask is read as a function of row and column (`index_reading.py`). One that is True everywhere is dropped; `column <=
row` becomes `is_causal`, which fast kernels need; another band stays a mask, and its width is recorded. A mask that
depends on anything else stays, with the reason. Nothing is guessed: the reading holds for all rows and columns.
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
from autopar.tracing.passes.edit import arguments_of
from autopar.tracing.passes.repeated_heads import own_heads

__all__ = ["ATTENTION_NOTE", "read_masks"]

aten = torch.ops.aten

# The key of an `AttentionNote` in the meta of a node.
ATTENTION_NOTE = "attention"
# A mask value below this gives a weight of 0: a float32 exponential is 0 below -104.
HIDDEN = -1e4


def read_masks(graph: Graph, known: Mapping[Node, Tensor], sources: Mapping[Node, str]) -> None:
    """Rewrite the calls of fused attention, in place.

    `known`: constants whose data cannot change; `sources`: for each placeholder, what it is to the user.
    """
    reader = IndexReader(known, sources)
    for node in graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default):
        arguments = arguments_of(node)
        note, changed = _mask(reader, node, arguments)
        heads, reason = own_heads(node)
        _rewrite(node, {**changed, **heads})
        node.meta[ATTENTION_NOTE] = AttentionNote(note.mask, reason, note.band)


def _rewrite(node: Node, changed: Mapping[str, Any]) -> None:
    if not changed:
        return
    assert isinstance(node.target, torch._ops.OpOverload), node
    given = {**arguments_of(node), **changed}
    default = {argument.name: argument.default_value for argument in node.target._schema.arguments}
    tensors = tuple(given.pop(name) for name in ("query", "key", "value"))
    node.args = tensors
    node.kwargs = {name: value for name, value in given.items() if value != default[name]}


def _mask(reader: IndexReader, node: Node, arguments: Mapping[str, Any]) -> tuple[AttentionNote, dict[str, Any]]:
    """A kind of mask, and the arguments of attention that replace it."""
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
    if not _keeps_shape(node, arguments):
        return AttentionNote(f"mask kept: {text}, but the result has its leading dims", band=band), {}
    return AttentionNote(text), {"attn_mask": None, "is_causal": text == "causal"}


def _keeps_shape(node: Node, arguments: Mapping[str, Any]) -> bool:
    """Return whether the result has its leading dims without the mask, too."""
    query, key, value = (arguments[name].meta["val"] for name in ("query", "key", "value"))
    others = () if arguments["enable_gqa"] else (key.shape[:-2], value.shape[:-2])
    leading = torch.broadcast_shapes(query.shape[:-2], *others)  # type: ignore[no-untyped-call]
    return tuple(node.meta["val"].shape[:-2]) == tuple(leading)


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
    """The band of a mask, boolean or added to the scores."""
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
    for visible in (seen, negation(hidden, shape)):
        if len(visible) == 1:
            return _band(next(iter(visible)), shape)
    raise UnreadError("rows see more than one stretch of columns" if seen else "rows see nothing")


def _band(visible: Conjunction, shape: Shape) -> Band:
    left = right = None
    for affine in visible:
        times = dict(affine.coefficients)
        if set(times) - {-1, -2}:
            raise UnreadError("depends on the place in the batch or on the head")
        row, column = times.get(-2, 0), times.get(-1, 0)
        fits = abs(row - column) == 2 - (row == 0) - (column == 0) and row * column <= 0
        if not fits or (row == 0 and shape[-2] > 1) or (column == 0 and shape[-1] > 1):
            raise UnreadError("rows see columns that do not move with them")
        if row > 0 or column < 0:
            right = affine.constant if right is None else min(right, affine.constant)
        else:
            left = affine.constant if left is None else min(left, affine.constant)
    return Band(left, right)
