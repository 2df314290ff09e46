"""Attention of documents that do not see each other, and the table of the keys that each of its rows sees.

Input::

    mask = documents[:, None, :, None] == documents[:, None, None, :]
    y = scaled_dot_product_attention(q, k, v, attn_mask=mask & causal)
Output::

    table = document_ranges(documents[:, None], "same", causal=True)
    y = document_attention(q, k, v, table, "same", causal=True)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from autopar.rules.bind_call import fresh_names
from autopar.rules.call import Call
from autopar.rules.ops._names import text
from autopar.rules.ops.elementwise import aligned
from autopar.rules.proof.samples import Draw, Sample, Tries, make_sample
from autopar.rules.shard_call.documents import attend_documents, ranges_of
from autopar.rules.table import OpFamily

__all__ = ["DOCUMENT_ATTENTION", "DOCUMENT_RANGES", "FAMILIES", "TABLE"]

_LIBRARY: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("document_ranges(Tensor numbers, str kinds, *, bool causal=False, int window=0) -> Tensor")
_LIBRARY.define(
    "document_attention(Tensor query, Tensor key, Tensor value, Tensor table, str kinds, *, bool causal=False, "
    "int window=0, float? scale=None, bool enable_gqa=False, int pieces=1) -> Tensor"
)


def _document_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    kinds: str,
    *,
    causal: bool = False,
    window: int = 0,
    scale: float | None = None,
    enable_gqa: bool = False,
    pieces: int = 1,
) -> Tensor:
    return attend_documents(query, key, value, table, scale, enable_gqa, pieces, kinds, causal, window)


def _document_ranges(numbers: Tensor, kinds: str, *, causal: bool = False, window: int = 0) -> Tensor:
    return ranges_of(numbers, kinds, causal, window)


_LIBRARY.impl("document_ranges", _document_ranges, "CompositeImplicitAutograd")
_LIBRARY.impl("document_attention", _document_attention, "CompositeImplicitAutograd")

DOCUMENT_RANGES = torch.ops.autopar.document_ranges.default
DOCUMENT_ATTENTION = torch.ops.autopar.document_attention.default


def _ranges_rule(call: Call) -> str:
    return text([["b", "m!", "t!"]], [["b", "t!", "c!"]])


def _attention_rule(call: Call) -> str:
    """Write `b h (f! s) e, b h t e, b h t v, b r c -> b h (f! s) v`."""
    query, key = call.operand(0), call.operand(1)
    sizes = list(call.output.shape[:-2])
    (batch, _) = fresh_names(len(sizes), {"f", "h", "g", "s", "t", "e", "v", "r", "c"})
    grouped = bool(call["enable_gqa"]) and query.shape[-3] != key.shape[-3]
    query_dims, key_dims = [batch, "(h g)" if grouped else "h"], [batch, "h"]
    key_sizes = [sizes[0], key.shape[-3]]
    rows = "(f! s)" if call["pieces"] > 1 else "s"
    queries = [*aligned(query.shape[:-2], query_dims, sizes), rows, "e!"]
    keys = [*aligned(key.shape[:-2], key_dims, key_sizes), "t!", "e!"]
    values = [*aligned(call.operand(2).shape[:-2], key_dims, key_sizes), "t!", "v"]
    # The table has the plain order, rows and keys may be folded.
    table = [*aligned(call.operand(3).shape[:1], [batch], sizes[:1]), "r!", "c!"]
    clauses = "linear 2", "localise pieces=f" if call["pieces"] > 1 else "", "lower s document_rows"
    return text([queries, keys, values, table], [[*query_dims, rows, "v"]], *clauses)


def _numbers(kinds: str, rows: int) -> Tensor:
    """Return documents of two samples, of unlike lengths; the numbers of one repeat."""
    place = torch.arange(rows)
    found = torch.stack([place.ge(rows // 3).long(), place.ge(4).long() + place.ge(7).long()])
    more = torch.stack([place, place % 3]) if "order" in kinds else (place < rows - 2).long().expand(2, -1)
    return torch.stack([found, more][: len(kinds.split())], 1)


def _attention_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    def call(
        lead: tuple[int, ...], key_lead: tuple[int, ...], kinds: str = "same", rows: int = 12, **arguments: object
    ) -> Sample:
        shapes = (*lead, rows, 4), (*key_lead, rows, 4), (*key_lead, rows, 9)
        mask = {name: arguments.get(name, 0) for name in ("causal", "window")}
        table = ranges_of(_numbers(kinds, rows), kinds, bool(mask["causal"]), int(mask["window"]))  # type: ignore[call-overload]
        return make_sample(op, [*map(Draw, shapes), table], {"kinds": kinds, **arguments}, tries)

    yield call((2, 3), (2, 3), causal=True)
    yield call((2, 3), (2, 3), "same order", causal=True, scale=0.7)
    yield call((2, 3), (2, 3), "same order")
    yield call((2, 3), (2, 3), "same seen", causal=True)
    yield call((2, 3), (2, 3))
    yield call((2, 3), (2, 3), rows=24, pieces=4, causal=True)
    yield call((2, 3), (2, 3), window=3, causal=True, pieces=2)
    yield call((2, 3), (2, 1), causal=True)
    yield call((2, 6), (2, 3), enable_gqa=True, causal=True)


def _ranges_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    for kinds in ("same", "same order", "same seen"):
        for causal in (True, False):
            yield make_sample(op, [_numbers(kinds, 12)], {"kinds": kinds, "causal": causal}, tries)
    yield make_sample(op, [_numbers("same", 12)], {"kinds": "same", "causal": True, "window": 3}, tries)


TABLE = """
autopar.document_ranges.default      document_ranges
autopar.document_attention.default   document_attention
"""

FAMILIES = {
    "document_ranges": OpFamily(_ranges_rule, _ranges_samples),
    "document_attention": OpFamily(_attention_rule, _attention_samples),
}
