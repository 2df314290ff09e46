"""Attention: queries, values, heads and batch are parallel; keys and the dim of the products stay whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from autopar.rules.bind_call import fresh_names
from autopar.rules.call import Call
from autopar.rules.ops._names import text
from autopar.rules.ops.elementwise import aligned
from autopar.rules.proof.samples import Draw, Sample, Tries, make_sample
from autopar.rules.table import OpFamily

__all__ = ["FAMILIES", "TABLE"]


def _leading(call: Call) -> tuple[list[str], list[str], list[int]]:
    """Return the leading dims of queries and of keys, and the queries' sizes; `(h g)` against `h` for grouped heads."""
    query, key = call.operand(0).shape[:-2], call.operand(1).shape[:-2]
    sizes = list(call.output.shape[:-2])
    names = fresh_names(len(sizes), {"h", "g", "s", "t", "e", "v"})
    if not sizes:
        return names, names, sizes
    grouped = bool(call.get("enable_gqa")) and query[-1:] != key[-1:]
    if not grouped:
        return [*names[:-1], "h"], [*names[:-1], "h"], sizes
    return [*names[:-1], "(h g)"], [*names[:-1], "h"], sizes


def _attention(call: Call) -> str:
    """Write `b h s e, b h t e, b h t v -> b h s v`; the op is linear in the values alone."""
    query_dims, key_dims, sizes = _leading(call)
    # Keys and values may have fewer heads than queries: they broadcast to leading sizes of their own.
    key_sizes = [*sizes[:-1], *call.operand(1).shape[-3:-2]] if call.operand(1).rank > 2 else sizes
    queries = [*aligned(call.operand(0).shape[:-2], query_dims, sizes), "s", "e!"]
    keys = [*aligned(call.operand(1).shape[:-2], key_dims, key_sizes), "t!", "e!"]
    width = "v!" if call["dropout_p"] > 0 else "v"  # the columns of the values share the dropped weights
    values = [*aligned(call.operand(2).shape[:-2], key_dims, key_sizes), "t!", width]
    # The mask broadcasts to the scores, one row for each query and one column for each key.
    scores = (*call.output.shape[:-1], call.operand(1).shape[-2])
    mask_dims = [*query_dims, "s", "t!"]
    masks = [None if spec is None else aligned(spec.shape, mask_dims, scores) for spec in call.operands[3:]]
    clauses = [
        "linear 2",
        "random" if call["dropout_p"] > 0 else "",
        "lower s causal_rows" if call["is_causal"] else "",
    ]
    return text([queries, keys, values, *masks], [[*query_dims, "s", "v"]], *clauses)


def _attention_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    def call(lead: Sequence[int], key_lead: Sequence[int], mask: Draw | None = None, **arguments: object) -> Sample:
        query, key, value = (*lead, 5, 4), (*key_lead, 7, 4), (*key_lead, 7, 9)
        return make_sample(op, [*map(Draw, (query, key, value)), mask], arguments, tries)

    yield call((2, 3), (2, 3))
    yield call((2, 3), (2, 3), is_causal=True)
    yield call((3,), (3,), scale=0.7)
    yield call((), ())
    for shape in ((5, 7), (1, 7), (2, 1, 5, 7), (1, 3, 5, 7), (2, 1, 1, 7), (7,)):
        yield call((2, 3), (2, 3), Draw(shape))
    yield call((2, 3), (2, 3), Draw((5, 7), "bool"))
    yield call((2, 3), (2, 1))
    yield call((2, 3), (2, 3), dropout_p=0.4)
    yield call((2, 6), (2, 3), enable_gqa=True)
    yield call((2, 6), (2, 3), enable_gqa=True, is_causal=True)
    yield call((2, 3), (2, 3), enable_gqa=True)
    yield call((2, 6), (2, 3), Draw((2, 6, 5, 7)), enable_gqa=True)
    yield call((2, 6), (2, 3), Draw((2, 1, 5, 7)), enable_gqa=True)
    yield call((2, 3), (2, 1), enable_gqa=True)
    yield make_sample(op, [Draw((2, 3, 7, 4)), Draw((2, 3, 5, 4)), Draw((2, 3, 5, 4))], {"is_causal": True}, tries)


FAMILIES = {"attention": OpFamily(_attention, _attention_samples)}

TABLE = """
aten.scaled_dot_product_attention.default                   attention
"""
