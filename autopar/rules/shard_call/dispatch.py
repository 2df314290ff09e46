"""Make one shard's call when a factor is split: localise its arguments, or lower it to another function.

A localiser changes one argument of the op (a size, an offset); a lowering changes the call (a masked lookup instead of
a lookup). Both take one shard's call and give a new one, and neither communicates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch

from autopar.rules.call import takes_tensors
from autopar.rules.notation import FactorKind, Operand, Rule
from autopar.rules.ops.index import own_bags, own_rows
from autopar.rules.ops.matmul import grouped_experts, grouped_rows
from autopar.rules.ops.routed import own_groups
from autopar.rules.shard_call.documents import document_rows
from autopar.rules.shard_call.folded import folded_rows
from autopar.rules.shard_call.last_rows import causal_rows
from autopar.rules.shard_call.local_call import FactorSlice, LocalCall, narrow
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
    """Return the call that one shard makes when `piece.factor` is split, on slices of the whole tensors."""
    kind = kind or rule.kinds[piece.factor]
    local_sizes = {**sizes, piece.factor: piece.length}
    lowering = rule.lowering(piece.factor) or ("window" if kind is FactorKind.HALO else None)
    added = rule.added_operands(piece.factor) if kind is FactorKind.SUM and piece.index > 0 else frozenset()
    position = -1

    def shard(tensor: torch.Tensor | None, operand: Operand | None) -> torch.Tensor | None:
        if tensor is None or operand is None:
            return tensor
        if position in added:
            # Zeros that depend on the tensor: its gradient exists on every shard.
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
    # Localisers first: a lowering sees arguments that fit the shard.
    local = LocalCall(op, changed, rule, sizes, local_sizes)
    for word in rule.localise:
        local = localiser(word)(local, piece)
    return LOWERINGS[lowering](local, piece) if lowering else local


Lowering = Callable[[LocalCall, FactorSlice], LocalCall]


def localiser(word: str) -> Lowering:
    """Return the function of a word of a `localise` clause; `length=s` sets the extent of a factor."""
    argument, equals, factor = word.partition("=")
    if not equals:
        return LOCALISERS[word]
    return lambda local, piece: local.with_arguments(**{argument: local.local_sizes[factor]})


# -- arguments that follow the shard -----------------------------------------------------------------------------------


def _output_shape(name: str) -> Lowering:
    """Localise arguments that repeat the output's shape, or its last dims; one number is the extent of `dim`."""

    def localise(local: LocalCall, piece: FactorSlice) -> LocalCall:
        given, shape = local.arguments[name], local.output_shape()
        if given is None:
            return local
        if isinstance(given, int):
            dim = local.arguments["dim"]
            return local.with_arguments(**{name: shape[dim or 0]})
        return local.with_arguments(**{name: shape[len(shape) - len(given) :]})

    return localise


def _as_reshape(local: LocalCall, piece: FactorSlice) -> LocalCall:
    """Reshape to the output's shape instead: strides and dims of size 1 of a shard are not those of the whole."""
    arguments = {"self": local.arguments["self"], "shape": local.output_shape()}
    return replace(local, op=torch.ops.aten.reshape.default, arguments=arguments)


def _copies(name: str) -> Lowering:
    """Localise the repetitions of each dim, or of one: the output's extent by the input's."""

    def localise(local: LocalCall, piece: FactorSlice) -> LocalCall:
        given = local.arguments[name]
        before, after = list(local.arguments["self"].shape), local.output_shape()
        if isinstance(given, int):
            dim = local.arguments.get("dim")
            # By the repeated dim alone: another one may be empty.
            ends = (prod(before), prod(after)) if dim is None else (before[dim], after[dim])
            return local.with_arguments(**{name: ends[1] // ends[0] if ends[0] else given})
        before = [1] * (len(after) - len(before)) + before
        wanted = [1] * (len(after) - len(given)) + list(given)
        counts = [to // size if size else count for size, to, count in zip(before, after, wanted, strict=True)]
        return local.with_arguments(**{name: counts})

    return localise


def _chunk_bounds(local: LocalCall, piece: FactorSlice) -> LocalCall:
    """Return the bounds of one of the equal chunks of a dim, when the chunks are split."""
    operand = local.rule.operands[0]
    assert operand is not None, "a slice has an operand"
    term = operand.terms[local.arguments["dim"]]
    if piece.factor not in term:
        return local
    start = local.arguments["start"] or 0
    start = start + prod(local.sizes[name] for name in term) if start < 0 else start
    bounds = {"start": start // piece.total * piece.length, "end": (start // piece.total + 1) * piece.length}
    return local.with_arguments(**{name: bound for name, bound in bounds.items() if name in local.arguments})


def _chunk_lengths(name: str) -> Lowering:
    """Return the lengths of equal parts."""

    def localise(local: LocalCall, piece: FactorSlice) -> LocalCall:
        length = local.output_shape()[local.arguments["dim"]]
        given = local.arguments[name]
        return local.with_arguments(**{name: length if isinstance(given, int) else [length] * len(given)})

    return localise


def _diagonal(local: LocalCall, piece: FactorSlice) -> LocalCall:
    """Shift the diagonal by the shard's first row or column."""
    operand = local.rule.operands[0]
    assert operand is not None, "a triangle has an operand"
    rows, columns = operand.terms[-2:]
    offset = piece.start if piece.factor in rows else -piece.start if piece.factor in columns else 0
    return local.with_arguments(diagonal=local.arguments["diagonal"] + offset)


def _padding_index(local: LocalCall, piece: FactorSlice) -> LocalCall:
    """Count the row without a gradient in the shard's rows; -1 where another shard has it."""
    row = local.arguments["padding_idx"]
    operand = local.rule.operands[0]
    if operand is None or piece.factor not in operand.terms[0]:
        return local
    return local.with_arguments(padding_idx=row - piece.start if piece.start <= row < piece.stop else -1)


def _dense(local: LocalCall, piece: FactorSlice) -> LocalCall:
    """Make the gradient dense: a sparse one cannot be sent."""
    return local.with_arguments(sparse=False)


def _resized(local: LocalCall, piece: FactorSlice) -> LocalCall:
    """Give the output's size in numbers, in place of scale factors, which would be rounded."""
    count = len(local.arguments.get("scale_factors") or local.arguments.get("output_size") or ())
    scales = {name: None for name in local.arguments if name.startswith("scale")}
    return local.with_arguments(**scales, output_size=local.output_shape()[-count:])


def _default_cross_dim(local: LocalCall, piece: FactorSlice) -> LocalCall:
    """Give `cross` the first dim of length 3 of the whole tensor; a shard may have another."""
    operand = local.rule.operands[0]
    assert operand is not None, "a cross product has operands"
    if local.arguments["dim"] is not None:
        return local
    whole = [prod(local.sizes[name] for name in term) for term in operand.terms]
    return local.with_arguments(dim=whole.index(3))


LOCALISERS: dict[str, Lowering] = {
    **{name: _output_shape(name) for name in ("size", "shape", "output_size")},
    "as_reshape": _as_reshape,
    "repeats": _copies("repeats"),
    "dims": _copies("dims"),
    "start": _chunk_bounds,
    "split_size": _chunk_lengths("split_size"),
    "split_sizes": _chunk_lengths("split_sizes"),
    "resized": _resized,
    "diagonal": _diagonal,
    "cross_dim": _default_cross_dim,
    "padding_idx": _padding_index,
    "sparse": _dense,
}


# -- lookups in a split dim --------------------------------------------------------------------------------------------


def masked_lookup(local: LocalCall, piece: FactorSlice) -> LocalCall:
    """Look up what this shard holds, zeros elsewhere."""
    operand, (index, inside) = _position(local, piece), _own_positions(local, piece)
    mask = inside.reshape(_mask_shape(local, operand, inside))
    shifted = _with_operand(local, operand, torch.where(inside, index, 0))
    return replace(shifted, finish=(*local.finish, lambda result: torch.where(mask, result, 0)))


def masked_write(local: LocalCall, piece: FactorSlice) -> LocalCall:
    """Write what falls in this shard."""
    operand, (index, inside) = _position(local, piece), _own_positions(local, piece)
    target = local.rule.operands[0]
    assert target is not None, "a write has a tensor to write to"
    dim = target.terms.index((piece.factor,))
    rows = local.arguments["self"]
    # Writes of other shards go to one spare row, which is cut off again.
    spare = torch.ones_like(rows.narrow(dim, 0, 1))
    shifted = _with_operand(local, operand, torch.where(inside, index, piece.length))
    widened = shifted.with_arguments(self=torch.cat([rows, spare], dim))
    return replace(widened, finish=(*local.finish, lambda result: result.narrow(dim, 0, piece.length)))


def _position(local: LocalCall, piece: FactorSlice) -> int:
    return next(operand for operand, factor in local.rule.indices if factor == piece.factor)


def _own_positions(local: LocalCall, piece: FactorSlice) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the index counted from the shard's first position, and where it falls in the shard."""
    index = _flat(local.op, local.arguments)[_position(local, piece)][-1]
    # Negative positions count from the end of the whole dim.
    shifted = torch.where(index < 0, index + piece.total, index) - piece.start
    return shifted, (shifted >= 0) & (shifted < piece.length)


def _mask_shape(local: LocalCall, operand: int, inside: torch.Tensor) -> list[int]:
    """Return the index's dims where they stand in the output."""
    index, output = local.rule.operands[operand], local.rule.outputs[0]
    assert index is not None, "a lookup has an index"
    assert output is not None, "a lookup has an output"
    extents = {term: size for term, size in zip(index.terms, inside.shape, strict=True) if term}
    return [extents.get(term, 1) for term in output.terms]


def _flat(op: Any, arguments: Mapping[str, Any]) -> list[tuple[str, int | None, Any]]:
    """Return all operands: argument, place in it where it is a list, and tensor."""
    flat: list[tuple[str, int | None, Any]] = []
    for name, is_list in takes_tensors(op).items():
        if is_list:
            flat.extend((name, i, value) for i, value in enumerate(arguments[name] or ()))
        else:
            flat.append((name, None, arguments[name]))
    return flat


def _with_operand(local: LocalCall, operand: int, tensor: torch.Tensor) -> LocalCall:
    name, place, _ = _flat(local.op, local.arguments)[operand]
    if place is None:
        return local.with_arguments(**{name: tensor})
    values = list(local.arguments[name])
    values[place] = tensor
    return local.with_arguments(**{name: values})


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
    "folded_rows": folded_rows,
    "document_rows": document_rows,
    "grouped_rows": grouped_rows,
    "grouped_experts": grouped_experts,
    "own_groups": own_groups,
}
