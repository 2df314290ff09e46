"""Replace masks that keep documents apart by a table of the keys that each row sees.

Packed documents depend on data: on positions that begin again (transformers), or on a number for each document. Such a
mask is a conjunction of facts about a row and a key. Each compares two views of one vector, along the rows and along
the keys; or it is a band, such as the causal order. The vectors go into a table, once for all layers. Attention then
computes the scores within documents, and no mask is made. Any other mask stays an operand.

Input::

    apart = eq(unsqueeze(documents, 2), unsqueeze(documents, 1))
    mask = unsqueeze(and(apart, le(arange(8)[None], arange(8)[:, None])), 1)
    y = scaled_dot_product_attention(q, k, v, attn_mask=mask)
Output::

    table = document_ranges(stack([documents], 1), "same", causal=True)
    y = document_attention(q, k, v, table, "same", causal=True)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import isinf
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from autopar.ir.values import DOCUMENTS, AttentionNote, Band
from autopar.rules.ops.documents import DOCUMENT_ATTENTION, DOCUMENT_RANGES
from autopar.rules.shard_call.document_ranges import NEAR, ORDER, SAME, SEEN
from autopar.tracing.indices.piecewise import Affine, UnreadError
from autopar.tracing.indices.reading import IndexReader
from autopar.tracing.passes.edit import arguments_of, insert, value_of
from autopar.tracing.passes.edit import replace as replace_node
from autopar.tracing.passes.read_masks import ATTENTION_NOTE, HIDDEN, band_of

__all__ = ["read_documents"]

aten = torch.ops.aten

# Most ops before two values that are compared.
MOST_STEPS = 8
# Most elements of the table of an example.
MOST_ELEMENTS = 2**26

_AND = ("bitwise_and", "logical_and", "__and__")
_OR = ("bitwise_or", "logical_or", "__or__")
_NOT = ("bitwise_not", "logical_not")
_COPIES = ("clone", "contiguous", "alias", "detach", "lift_fresh_copy", "_to_copy")
_VIEWS = ("reshape", "view", "unsqueeze", "squeeze", "permute", "transpose", "expand")
_OPPOSITE = {"eq": "ne", "ne": "eq", "le": "gt", "gt": "le", "lt": "ge", "ge": "lt"}


class _Other(Exception):
    """A mask that is no conjunction of facts about documents."""


@dataclass
class _Facts:
    """Vectors of a mask with their facts, in order and each once, and its band."""

    vectors: dict[tuple[Node, str], None] = field(default_factory=dict)
    left: int | None = None
    right: int | None = None
    # Rows that see nothing get zeros.
    is_exact: bool = True

    def add_band(self, band: Band) -> None:
        if band.left is not None:
            self.left = band.left if self.left is None else min(self.left, band.left)
        if band.right is not None:
            self.right = band.right if self.right is None else min(self.right, band.right)

    @property
    def causal(self) -> bool:
        return self.right == 0

    @property
    def window(self) -> int:
        """Return the keys up to each row that it sees; 0 for all."""
        return 0 if self.left is None else self.left + 1

    def keep_documents_apart(self) -> bool:
        """Return whether attention of documents computes this mask."""
        kinds = [kind for _, kind in self.vectors]
        has_band = self.right in (None, 0) and (self.left is None or (self.causal and self.left >= 0))
        return SAME in kinds and has_band and (self.is_exact or SEEN not in kinds)


def read_documents(
    graph: Graph, constants: Mapping[Node, Tensor], sources: Mapping[Node, str], examples: Mapping[Node, Tensor]
) -> None:
    """Rewrite the calls of fused attention in place, after `read_masks` has noted the mask of each.

    `examples` has the inputs with data: the note gets the share of the scores that they need.
    """
    reader = IndexReader(constants, sources)
    tables = _Tables({**constants, **examples})
    known: dict[tuple[Node, int], _Facts | None] = {}
    for node in graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default):
        given = arguments_of(node)
        mask = given["attn_mask"]
        note: AttentionNote = node.meta[ATTENTION_NOTE]
        if not isinstance(mask, Node) or note.band is not None or given["dropout_p"] or given["is_causal"]:
            continue
        if not _has_plain_shape(given, node):
            continue
        key = mask, given["query"].meta["val"].shape[-2]
        if key not in known:
            known[key] = _facts_of(reader, mask, key[1])
        found = known[key]
        if found is not None:
            _rewrite(node, given, found, tables)


def _has_plain_shape(given: Mapping[str, Any], node: Node) -> bool:
    """Return whether all have batch and heads, rows are as many as keys, and the mask adds no dim."""
    shapes = [given[name].meta["val"].shape for name in ("query", "key", "value")]
    mask = given["attn_mask"].meta["val"]
    rows = shapes[0][-2]
    has_order = rows > 1 and all(len(shape) == 4 and shape[-2] == rows for shape in shapes)
    batch = {shape[0] for shape in shapes}
    is_mask = mask.shape[-2:] == (rows, rows) and mask.dim() <= 4 and not mask.requires_grad
    leads = (*(1 for _ in range(4 - mask.dim())), *mask.shape[:-2])
    return bool(
        has_order
        and is_mask
        and len(batch) == 1
        and leads[0] in (1, shapes[0][0])
        and leads[1] == 1
        and tuple(node.meta["val"].shape[:2]) == tuple(shapes[0][:2])
    )


def _facts_of(reader: IndexReader, mask: Node, rows: int) -> _Facts | None:
    """Return the facts of a mask; None unless it keeps documents apart."""
    found = _Facts()
    try:
        _Reading(reader, rows, found).conjunction(mask, True, -4 if mask.meta["val"].dim() == 4 else None)
    except _Other:
        return None
    return found if found.keep_documents_apart() else None


@dataclass
class _Reading:
    """Read a mask from its end; dims -2 and -1 of all that is read are row and key.

    `batch` is the place of the dim of the samples, counted from the right; None where all have one mask.
    """

    reader: IndexReader
    rows: int
    found: _Facts

    def conjunction(self, node: Any, truth: bool, batch: int | None) -> None:
        """Add the facts for which a mask is visible: `truth` is False below a negation."""
        if not isinstance(node, Node):
            raise _Other
        val = node.meta["val"]
        if truth and self._shows(node, val.dtype is torch.bool):
            return
        is_mask = tuple(val.shape[-2:]) == (self.rows, self.rows)
        if truth and is_mask:
            try:
                self.found.add_band(band_of(self.reader.pieces(node), tuple(val.shape)))
            except UnreadError:
                pass
            else:
                return
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            raise _Other
        name, given = node.target._schema.name.removeprefix("aten::"), arguments_of(node)
        if is_mask:
            self._of_matrix(node, name, given, truth, batch)
        else:
            self._of_vector(node, name, given, truth, batch)

    def _of_matrix(self, node: Node, name: str, given: Mapping[str, Any], truth: bool, batch: int | None) -> None:
        is_bool = node.meta["val"].dtype is torch.bool
        if name in (_AND if truth else _OR) and is_bool:
            for operand in ("self", "other"):
                self.conjunction(given[operand], truth, batch)
        elif name in _NOT and is_bool:
            self.conjunction(given["self"], not truth, batch)
        elif name in _OPPOSITE:
            self._comparison(name if truth else _OPPOSITE[name], given, batch)
        elif name == "tril" and is_bool and truth:
            self.found.add_band(Band(None, given["diagonal"]))
            self.conjunction(given["self"], truth, batch)
        elif name in ("where", "masked_fill") and truth:
            self._choice(name, given, batch, is_bool)
        elif name in _COPIES and _same_kind(given["self"].meta["val"].dtype, node.meta["val"].dtype):
            self.conjunction(given["self"], truth, batch)
        elif name in _VIEWS:
            self.conjunction(given["self"], truth, self._batch_before(node, given["self"], batch))
        else:
            raise _Other

    def _batch_before(self, node: Node, source: Node, batch: int | None) -> int | None:
        """Return the place of the samples before a view that changes dims of extent 1 before row and key alone."""
        old = tuple(source.meta["val"].shape)
        if node.target is aten.expand.default:
            return batch
        if old[-2:] != (self.rows, self.rows) or not _keeps_order(node, source):
            raise _Other
        # Only the samples have an extent there: the mask has one head.
        long = [dim - len(old) for dim, size in enumerate(old[:-2]) if size != 1]
        return long[0] if long else None

    def _choice(self, name: str, given: Mapping[str, Any], batch: int | None, is_bool: bool) -> None:
        """Read a choice between two masks by a condition, one of which hides all."""
        if name == "where":
            condition, first, second = given["condition"], given["self"], given["other"]
            options = [(first, second, True), (second, first, False)]
        else:
            condition, options = given["mask"], [(given["self"], given["value"], False)]
        for shown, hidden, holds in options:
            number = self._number(hidden)
            if number is None or not (not number if is_bool else number < HIDDEN):
                continue
            # A finite number added to all scores of a row hides none of them.
            self.found.is_exact &= is_bool or isinf(number)
            self.conjunction(condition, holds, batch)
            if not self._shows(shown, is_bool):
                self.conjunction(shown, True, batch)
            return
        raise _Other

    def _number(self, value: Any) -> Any:
        """Return the number that all elements of an operand are; None if they differ."""
        if not isinstance(value, Node):
            return value
        try:
            pieces = self.reader.pieces(value)
        except UnreadError:
            return None
        term = pieces[0][0]
        if len(pieces) != 1 or (isinstance(term, Affine) and term.coefficients):
            return None
        return term.constant if isinstance(term, Affine) else term

    def _shows(self, value: Any, is_bool: bool) -> bool:
        number = self._number(value)
        return number is not None and (bool(number) if is_bool else number == 0)

    # -- facts

    def _comparison(self, name: str, given: Mapping[str, Any], batch: int | None) -> None:
        first, second = given["self"], given["other"]
        if not isinstance(first, Node) or not isinstance(second, Node):
            raise _Other
        along = self._along(first, batch), self._along(second, batch)
        if sorted(along) != [-2, -1]:
            raise _Other
        # As a comparison of the key with the row.
        turned = {"le": "ge", "ge": "le", "lt": "gt", "gt": "lt"}
        relation = name if along == (-1, -2) else turned.get(name, name)
        rows, keys = (_base(first), _base(second)) if along == (-2, -1) else (_base(second), _base(first))
        if relation in ("eq", "le") and _are_equal(rows, keys):
            self._add(rows, SAME if relation == "eq" else ORDER)
            return
        # The key is less than a window behind the row.
        less, width = _difference(rows)
        if relation not in ("gt", "ge") or less is None or not _are_equal(less, keys) or width < 1:
            raise _Other
        self._add(keys, f"{NEAR}{width + (relation == 'ge')}")

    def _of_vector(self, node: Node, name: str, given: Mapping[str, Any], truth: bool, batch: int | None) -> None:
        """Read a mask of keys alone."""
        if not truth and name in _NOT:
            self.conjunction(given["self"], True, batch)
            return
        if not truth or self._along(node, batch) != -1 or node.meta["val"].dtype is not torch.bool:
            raise _Other
        self._add(_base(node), SEEN)

    def _along(self, node: Node, batch: int | None) -> int:
        """Return the dim, row or key, along which a vector stands; it may have samples."""
        shape = tuple(node.meta["val"].shape)
        shape = (*(1 for _ in range(2 - len(shape))), *shape)
        long = [dim - len(shape) for dim, size in enumerate(shape) if size != 1]
        others = [dim for dim in long if dim not in (-1, -2, batch)]
        places = [dim for dim in long if dim in (-1, -2)]
        if others or len(places) != 1 or shape[places[0]] != self.rows:
            raise _Other
        return places[0]

    def _add(self, base: Node, kind: str) -> None:
        val = base.meta["val"]
        if val.is_floating_point() or val.is_complex() or val.requires_grad:
            raise _Other
        self.found.vectors[base, kind] = None


def _same_kind(old: torch.dtype, new: torch.dtype) -> bool:
    """Return whether a cast keeps a mask: boolean, or added to scores."""
    return old is new or (old.is_floating_point and new.is_floating_point)


def _base(node: Node) -> Node:
    """Return the tensor of which a node is a view with the same elements in the same order."""
    while node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
        name = node.target._schema.name.removeprefix("aten::")
        if name not in _VIEWS and (name not in _COPIES or name == "_to_copy"):
            break
        source = node.args[0]
        if not isinstance(source, Node) or not _keeps_order(node, source):
            break
        node = source
    return node


def _difference(node: Node) -> tuple[Node | None, int]:
    """Return a vector and the whole number that is subtracted from it."""
    if node.target is aten.sub.Tensor:
        given = arguments_of(node)
        if isinstance(given["self"], Node) and type(given["other"]) is int and given["alpha"] == 1:
            return _base(given["self"]), given["other"]
    return None, 0


def _are_equal(one: Any, other: Any, steps: int = MOST_STEPS) -> bool:
    """Return whether two arguments are one value: the same node, or the same op on equal arguments."""
    if isinstance(one, Node) and isinstance(other, Node) and one is not other:
        is_op = one.op == other.op == "call_function" and isinstance(one.target, torch._ops.OpOverload)
        if not is_op or one.target is not other.target or steps == 0:
            return False
        if torch.Tag.nondeterministic_seeded in one.target.tags:  # type: ignore[union-attr]
            return False
        pairs = ((one.args, other.args), (one.kwargs, other.kwargs))
        return all(_are_equal(mine, its, steps - 1) for mine, its in pairs)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(
            _are_equal(mine, its, steps) for mine, its in zip(one, other, strict=True)
        )
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_are_equal(one[key], other[key], steps) for key in one)
    return type(one) is type(other) and bool(one == other)


def _keeps_order(node: Node, source: Node) -> bool:
    """Return whether a view only adds, drops or moves dims of extent 1."""
    old, new = (tuple(one.meta["val"].shape) for one in (source, node))
    if [size for size in old if size != 1] != [size for size in new if size != 1]:
        return False
    order = list(range(len(old)))
    if node.target is aten.permute.default:
        order = [dim % len(old) for dim in arguments_of(node)["dims"]]
    elif node.target is aten.transpose.int:
        first, second = (arguments_of(node)[name] % len(old) for name in ("dim0", "dim1"))
        order[first], order[second] = order[second], order[first]
    moved = [dim for dim in order if old[dim] != 1]
    return moved == sorted(moved)


# -- the new graph -----------------------------------------------------------------------------------------------------


@dataclass
class _Tables:
    """Tables by their vectors, each with the share of the scores that the example inputs need."""

    known: Mapping[Node, Tensor]
    made: dict[tuple[Any, ...], tuple[Node, float | None]] = field(default_factory=dict)


def _share(table: Tensor | None) -> float | None:
    """Return the share of all scores that a table asks for; None without its data."""
    if table is None:
        return None
    first, stop = table[..., 0], table[..., 1]
    rows = table.shape[1]
    # Rows that see several ranges are masked in blocks, of all keys.
    several = (first < 0).all(1).sum() * rows * rows
    return float((stop - first).sum() + several) / max(table.shape[0] * rows * rows, 1)


def _rewrite(node: Node, given: Mapping[str, Any], found: _Facts, tables: _Tables) -> None:
    kinds = " ".join(kind for _, kind in found.vectors)
    mask: dict[str, Any] = {"causal": found.causal, "window": found.window}
    vectors = tuple(base for base, _ in found.vectors)
    rows = given["query"].meta["val"].shape[-2]
    # A region that is recomputed has a table of its own.
    key = (vectors, kinds, *mask.values(), given["attn_mask"].meta["origin"].checkpoint)
    if key not in tables.made:
        table = _table(given["attn_mask"], vectors, kinds, mask, rows)
        tables.made[key] = table, _share(value_of(table, tables.known, MOST_ELEMENTS))
    table, share = tables.made[key]
    options = {name: given[name] for name in ("scale", "enable_gqa")}
    operands = [given[name] for name in ("query", "key", "value")]
    made = insert(node, DOCUMENT_ATTENTION, *operands, table, kinds, **mask, **options)
    causal = found.causal or ORDER in kinds
    text = DOCUMENTS if causal else f"{DOCUMENTS}, in both directions"
    near = [int(kind.removeprefix(NEAR)) for _, kind in found.vectors if kind.startswith(NEAR)]
    window = min(near + ([found.window] if found.window else []), default=0)
    text += f", window {window}" if window else ""
    band = Band(window - 1 if window else None, 0 if causal else None)
    made.meta[ATTENTION_NOTE] = replace(node.meta[ATTENTION_NOTE], mask=text, band=band, document_share=share)
    replace_node(node, made)


def _table(mask: Node, vectors: tuple[Node, ...], kinds: str, options: Mapping[str, Any], rows: int) -> Node:
    """Insert the table after all vectors, before the mask that it replaces."""
    batch = max(base.meta["val"].numel() // rows for base in vectors)
    found = []
    for base in vectors:
        own = base.meta["val"].numel() // rows
        one = insert(mask, aten.reshape.default, base, [own, rows])
        if one.meta["val"].dtype is not torch.int64:
            one = insert(mask, aten._to_copy.default, one, dtype=torch.int64)
        found.append(one if own == batch else insert(mask, aten.expand.default, one, [batch, rows]))
    numbers = insert(mask, aten.stack.default, found, 1)
    return insert(mask, DOCUMENT_RANGES, numbers, kinds, **options)
