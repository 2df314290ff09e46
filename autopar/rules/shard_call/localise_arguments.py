"""Arguments of an op that follow the shard: sizes, counts of copies, bounds of a slice, offsets of a diagonal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod

import torch

from autopar.rules.shard_call.local_call import FactorSlice, LocalCall

__all__ = ["LOCALISERS"]

Localiser = Callable[[LocalCall, FactorSlice], LocalCall]


def _output_shape(name: str) -> Localiser:
    """Arguments that repeat the shape of the output, or its last dims; one number is the extent of `dim`."""

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
    """A shard's strides, and its dims of size 1, are not those of the whole tensor: say the output's shape instead."""
    arguments = {"self": local.arguments["self"], "shape": local.output_shape()}
    return replace(local, op=torch.ops.aten.reshape.default, arguments=arguments)


def _copies(name: str) -> Localiser:
    """How often each dim, or one dim, is repeated: the output's extent by the input's."""

    def localise(local: LocalCall, piece: FactorSlice) -> LocalCall:
        given = local.arguments[name]
        before, after = list(local.arguments["self"].shape), local.output_shape()
        if isinstance(given, int):
            return local.with_arguments(**{name: prod(after) // max(prod(before), 1)})
        before = [1] * (len(after) - len(before)) + before
        wanted = [1] * (len(after) - len(given)) + list(given)
        counts = [to // size if size else count for size, to, count in zip(before, after, wanted, strict=True)]
        return local.with_arguments(**{name: counts})

    return localise


def _chunk_bounds(local: LocalCall, piece: FactorSlice) -> LocalCall:
    """The bounds of one of the equal chunks of a dim, when the chunks are split."""
    operand = local.rule.operands[0]
    assert operand is not None, "a slice has an operand"
    term = operand.terms[local.arguments["dim"]]
    if piece.factor not in term:
        return local
    start = local.arguments["start"] or 0
    start = start + prod(local.sizes[name] for name in term) if start < 0 else start
    bounds = {"start": start // piece.total * piece.length, "end": (start // piece.total + 1) * piece.length}
    return local.with_arguments(**{name: bound for name, bound in bounds.items() if name in local.arguments})


def _chunk_lengths(name: str) -> Localiser:
    """The lengths of equal parts."""

    def localise(local: LocalCall, piece: FactorSlice) -> LocalCall:
        length = local.output_shape()[local.arguments["dim"]]
        given = local.arguments[name]
        return local.with_arguments(**{name: length if isinstance(given, int) else [length] * len(given)})

    return localise


def _diagonal(local: LocalCall, piece: FactorSlice) -> LocalCall:
    """A shard that begins further down or further right sees the diagonal shifted."""
    operand = local.rule.operands[0]
    assert operand is not None, "a triangle has an operand"
    rows, columns = operand.terms[-2:]
    offset = piece.start if piece.factor in rows else -piece.start if piece.factor in columns else 0
    return local.with_arguments(diagonal=local.arguments["diagonal"] + offset)


def _padding_index(local: LocalCall, piece: FactorSlice) -> LocalCall:
    """The row without a gradient, counted in the shard's rows; -1 where another shard has it."""
    row = local.arguments["padding_idx"]
    operand = local.rule.operands[0]
    if operand is None or piece.factor not in operand.terms[0]:
        return local
    return local.with_arguments(padding_idx=row - piece.start if piece.start <= row < piece.stop else -1)


def _dense(local: LocalCall, piece: FactorSlice) -> LocalCall:
    """A sparse gradient cannot be sent: where a lookup is split its gradient is dense."""
    return local.with_arguments(sparse=False)


def _resized(local: LocalCall, piece: FactorSlice) -> LocalCall:
    """The output's size in numbers, in place of factors that would have to be rounded."""
    count = len(local.arguments.get("scale_factors") or local.arguments.get("output_size") or ())
    scales = {name: None for name in local.arguments if name.startswith("scale")}
    return local.with_arguments(**scales, output_size=local.output_shape()[-count:])


def _default_cross_dim(local: LocalCall, piece: FactorSlice) -> LocalCall:
    """`cross` without a dim takes the first of length 3: that of the whole tensor, and a shard may have another."""
    operand = local.rule.operands[0]
    assert operand is not None, "a cross product has operands"
    if local.arguments["dim"] is not None:
        return local
    whole = [prod(local.sizes[name] for name in term) for term in operand.terms]
    return local.with_arguments(dim=whole.index(3))


LOCALISERS: dict[str, Localiser] = {
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
