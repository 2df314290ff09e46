"""What becomes of a call when a factor is split: arguments that follow the shard, and functions that run instead.

A localiser changes one argument of the op (a size, an offset); a lowering changes the call (a masked lookup instead of
a lookup). Both take one shard's call and give a new one, and neither communicates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from autopar.rules.call import takes_tensors
from autopar.rules.notation import FactorKind, Operand, Rule
from autopar.rules.ops.embedding_bag import own_bags, own_rows
from autopar.rules.shard_call.local_call import FactorSlice, LocalCall, narrow
from autopar.rules.shard_call.localise_arguments import LOCALISERS
from autopar.rules.shard_call.masked_lookup import masked_lookup, masked_write
from autopar.rules.shard_call.row_offsets import causal_rows, grouped_experts, grouped_rows
from autopar.rules.shard_call.windows import arange_part, own_part, window, window_mean

__all__ = ["LOCALISERS", "LOWERINGS", "local_call", "localiser"]


def local_call(
    op: torch._ops.OpOverload,
    arguments: Mapping[str, Any],
    rule: Rule,
    sizes: Mapping[str, int],
    piece: FactorSlice,
    kind: FactorKind | None = None,
) -> LocalCall:
    """The call that one shard makes when `piece.factor` is split, on slices of the whole tensors."""
    kind = kind or rule.kinds[piece.factor]
    local_sizes = {**sizes, piece.factor: piece.length}
    lowering = rule.lowering(piece.factor) or ("window" if kind is FactorKind.HALO else None)
    added = rule.added_operands(piece.factor) if kind is FactorKind.SUM and piece.index > 0 else frozenset()
    position = -1

    def shard(tensor: torch.Tensor | None, operand: Operand | None) -> torch.Tensor | None:
        if tensor is None or operand is None:
            return tensor
        if position in added:
            return torch.zeros_like(tensor) * tensor
        if kind is FactorKind.HALO:
            return tensor
        return narrow(tensor, operand.terms, sizes, piece)

    changed = dict(arguments)
    for name, is_list in takes_tensors(op).items():
        values = list(arguments[name] or ()) if is_list else [arguments[name]]
        for i, value in enumerate(values):
            position += 1
            if isinstance(value, torch.Tensor):
                values[i] = shard(value, rule.operands[position])
        if arguments[name] is not None:
            changed[name] = values if is_list else values[0]
    local = LocalCall(op, changed, rule, sizes, local_sizes)
    for word in rule.localise:
        local = localiser(word)(local, piece)
    return LOWERINGS[lowering](local, piece) if lowering else local


Lowering = Callable[[LocalCall, FactorSlice], LocalCall]


def localiser(word: str) -> Lowering:
    """What a word of a `localise` clause does: `size` has its function, `length=s` is the extent of a factor."""
    argument, equals, factor = word.partition("=")
    return _extent(argument, factor) if equals else LOCALISERS[word]


def _extent(argument: str, factor: str) -> Lowering:
    def localise(local: LocalCall, piece: FactorSlice) -> LocalCall:
        return local.with_arguments(**{argument: local.local_sizes[factor]})

    return localise


LOWERINGS: dict[str, Lowering] = {
    "masked_lookup": masked_lookup,
    "masked_write": masked_write,
    "window": window,
    "window_mean": window_mean,
    "own_part": own_part,
    "arange_part": arange_part,
    "own_bags": own_bags,
    "own_rows": own_rows,
    "causal_rows": causal_rows,
    "grouped_rows": grouped_rows,
    "grouped_experts": grouped_experts,
}
