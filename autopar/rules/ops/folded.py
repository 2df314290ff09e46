"""The fold of a sequence and its inverse, and causal attention over a folded sequence.

A fold cuts a dim in an even number of pieces and reverses every odd one. The plain dim is `(s f)` in the rules, and the
folded one `(f s)`: a split of `s` gives each shard a part of the plain sequence before the fold, and a part of every
piece after it. So causal attention, whose later rows see more keys, has as much work on each shard.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from autopar.rules.bind_call import fresh_names
from autopar.rules.call import Call
from autopar.rules.ops._names import text, wrap
from autopar.rules.ops.elementwise import aligned
from autopar.rules.proof.samples import Draw, Sample, Tries, make_sample
from autopar.rules.shard_call import folded
from autopar.rules.table import OpFamily

__all__ = ["FAMILIES", "FOLD", "FOLDED_ATTENTION", "TABLE", "UNFOLD"]

_LIBRARY: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("fold(Tensor self, int dim, int pieces) -> Tensor")
_LIBRARY.define("unfold(Tensor self, int dim, int pieces) -> Tensor")
_LIBRARY.define(
    "folded_attention(Tensor query, Tensor key, Tensor value, *, float? scale=None, bool enable_gqa=False, "
    "int pieces=2, int window=0) -> Tensor"
)


def _folded_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    pieces: int = 2,
    window: int = 0,
) -> Tensor:
    return folded.attend_folded(query, key, value, scale, enable_gqa, pieces, window)


for _name, _function in (("fold", folded.fold), ("unfold", folded.fold), ("folded_attention", _folded_attention)):
    _LIBRARY.impl(_name, _function, "CompositeImplicitAutograd")

FOLD = torch.ops.autopar.fold.default
UNFOLD = torch.ops.autopar.unfold.default
FOLDED_ATTENTION = torch.ops.autopar.folded_attention.default


def _rule(call: Call, terms: tuple[str, str]) -> str:
    dims = fresh_names(call.operand(0).rank, {"s", "f"})
    place = wrap(call["dim"], len(dims))
    before, after = ([*dims[:place], term, *dims[place + 1 :]] for term in terms)
    return text([before], [after], "linear 0", "localise pieces=f")


def _attention_rule(call: Call) -> str:
    """Write `b h (f! s) e, b h t e, b h t v -> b h (f! s) v`."""
    query, key = call.operand(0), call.operand(1)
    sizes = list(call.output.shape[:-2])
    names = fresh_names(len(sizes), {"f", "h", "g", "s", "t", "e", "v"})
    grouped = bool(call["enable_gqa"]) and query.shape[-3] != key.shape[-3]
    heads = "(h g)" if grouped else "h"
    query_dims, key_dims = ([*names[:-1], one] if names else [] for one in (heads, "h"))
    key_sizes = [*sizes[:-1], *key.shape[-3:-2]] if key.rank > 2 else sizes
    queries = [*aligned(query.shape[:-2], query_dims, sizes), "(f! s)", "e!"]
    keys = [*aligned(key.shape[:-2], key_dims, key_sizes), "t!", "e!"]
    values = [*aligned(call.operand(2).shape[:-2], key_dims, key_sizes), "t!", "v"]
    clauses = "linear 2", "localise pieces=f", "lower s folded_rows"
    return text([queries, keys, values], [[*query_dims, "(f! s)", "v"]], *clauses)


def _fold_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    yield make_sample(op, [Draw((3, 12, 5))], {"dim": 1, "pieces": 2}, tries)
    yield make_sample(op, [Draw((24,))], {"dim": 0, "pieces": 4}, tries)
    yield make_sample(op, [Draw((2, 12), "int")], {"dim": -1, "pieces": 2}, tries)


def _attention_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    def call(lead: tuple[int, ...], key_lead: tuple[int, ...], rows: int = 12, **arguments: object) -> Sample:
        shapes = (*lead, rows, 4), (*key_lead, rows, 4), (*key_lead, rows, 9)
        return make_sample(op, list(map(Draw, shapes)), arguments, tries)

    yield call((2, 3), (2, 3))
    yield call((3,), (3,), scale=0.7)
    yield call((), ())
    yield call((2, 3), (2, 3), rows=24, pieces=4)
    yield call((2, 3), (2, 3), window=5)
    yield call((2, 3), (2, 1))
    yield call((2, 6), (2, 3), enable_gqa=True)


TABLE = """
autopar.fold.default               fold_order
autopar.unfold.default             unfold_order
autopar.folded_attention.default   folded_attention
"""

FAMILIES = {
    "fold_order": OpFamily(lambda call: _rule(call, ("(s! f!)", "(f! s!)")), _fold_samples),
    "unfold_order": OpFamily(lambda call: _rule(call, ("(f! s!)", "(s! f!)")), _fold_samples),
    "folded_attention": OpFamily(_attention_rule, _attention_samples),
}
