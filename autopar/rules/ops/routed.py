"""Rows by group: dispatch of rows to the experts that they are routed to, products by expert, and the way back.

A routed tensor has the dim `(g s)`: row `s` as expert `g` sees it. The ops below define its values in full: `dispatch`
leaves zeros for the experts that a row does not go to, and `combine` reads each row at its own expert. So their rules
are ordinary, and are proved by execution like all others. What runs stores the rows of their own expert only, one of
`g` (`autopar/rules/shard_call/sparse_rows.py`).

Input::

    y = expert_rows(expert_rows(x, up, key).relu(), down, key)
Output::

    y = combine(grouped(grouped(dispatch(x, key), up).relu(), down), key)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from autopar.rules.call import Call
from autopar.rules.proof.samples import Draw, Sample, Tries, make_sample
from autopar.rules.shard_call.local_call import FactorSlice, LocalCall
from autopar.rules.table import OpFamily

__all__ = ["COMBINE", "DISPATCH", "FAMILIES", "GROUPED_ROWS", "TABLE", "own_groups"]

_LIBRARY: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("dispatch(Tensor rows, Tensor key, int groups) -> Tensor")
_LIBRARY.define("grouped(Tensor rows, Tensor matrices, Tensor? bias, str product) -> Tensor")
_LIBRARY.define("combine(Tensor rows, Tensor key) -> Tensor")


def _dispatch(rows: Tensor, key: Tensor, groups: int) -> Tensor:
    """Return the rows once for each group, zero where the key of a row is another group."""
    own = key == torch.arange(groups, device=key.device, dtype=key.dtype).unsqueeze(1)
    return torch.where(own.unsqueeze(2), rows, 0).flatten(0, 1)


def _grouped(rows: Tensor, matrices: Tensor, bias: Tensor | None, product: str) -> Tensor:
    """Multiply the rows of each group by its matrix, and add its bias; `product` names the kernel of the model."""
    found = torch.bmm(rows.reshape(matrices.shape[0], -1, rows.shape[1]), matrices)
    return (found if bias is None else found + bias.unsqueeze(1)).flatten(0, 1)


def _combine(rows: Tensor, key: Tensor) -> Tensor:
    """Return each row as the group of its key has it."""
    rows = rows.reshape(-1, key.shape[0], *rows.shape[1:])
    return rows[key, torch.arange(key.shape[0], device=key.device)]


for _name, _function in (("dispatch", _dispatch), ("grouped", _grouped), ("combine", _combine)):
    _LIBRARY.impl(_name, _function, "CompositeImplicitAutograd")

DISPATCH = torch.ops.autopar.dispatch.default
GROUPED_ROWS = torch.ops.autopar.grouped.default
COMBINE = torch.ops.autopar.combine.default


def own_groups(local: LocalCall, piece: FactorSlice) -> LocalCall:
    """Dispatch to some of the groups: keys count from the first of them, and others match none."""
    return local.with_arguments(key=local.arguments["key"] - piece.start)


def _grouped_rule(call: Call) -> str:
    """Write the rule of a product by group, with or without a bias."""
    if call.operands[2] is None:
        return "(g s) k, g k n, ? -> (g s) n; linear 0 1"
    return "(g s) k, g k n, g n -> (g s) n; linear 0+2 1+2"


def _dispatch_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    for most in (4, 2):  # a group may have no rows
        yield make_sample(op, [Draw((11, 5)), Draw((11,), "index", most)], {"groups": 4}, tries)


def _grouped_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    for bias in (None, Draw((4, 7))):
        yield make_sample(op, [Draw((12, 5)), Draw((4, 5, 7)), bias], {"product": "aten._grouped_mm.default"}, tries)


def _combine_samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
    for most in (4, 2):
        yield make_sample(op, [Draw((44, 5)), Draw((11,), "index", most)], {}, tries)


TABLE = """
autopar.dispatch.default   dispatch
autopar.grouped.default    grouped_by_key
autopar.combine.default    combine
"""

FAMILIES = {
    "dispatch": OpFamily(
        lambda call: "s k, s -> (g s) k; linear 0; localise groups=g; lower g own_groups", _dispatch_samples
    ),
    "grouped_by_key": OpFamily(_grouped_rule, _grouped_samples),
    "combine": OpFamily(lambda call: "(g s) k, s -> s k; linear 0; index 1 g; lower g masked_lookup", _combine_samples),
}
