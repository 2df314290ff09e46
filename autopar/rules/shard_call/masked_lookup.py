"""Lookups by position in a dim that is split: each shard serves the positions that it holds.

A lookup gives zeros for the others, so the shards' results add up. A write drops the others, into a row that is added
for them and cut off afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from autopar.rules.call import takes_tensors
from autopar.rules.shard_call.local_call import FactorSlice, LocalCall

__all__ = ["masked_lookup", "masked_write"]


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
    spare = torch.ones_like(rows.narrow(dim, 0, 1))
    shifted = _with_operand(local, operand, torch.where(inside, index, piece.length))
    widened = shifted.with_arguments(self=torch.cat([rows, spare], dim))
    return replace(widened, finish=(*local.finish, lambda result: result.narrow(dim, 0, piece.length)))


def _position(local: LocalCall, piece: FactorSlice) -> int:
    return next(operand for operand, factor in local.rule.indices if factor == piece.factor)


def _own_positions(local: LocalCall, piece: FactorSlice) -> tuple[torch.Tensor, torch.Tensor]:
    """The index counted from the shard's first position, and where it falls in the shard."""
    index = _operands(local)[_position(local, piece)]
    shifted = torch.where(index < 0, index + piece.total, index) - piece.start
    return shifted, (shifted >= 0) & (shifted < piece.length)


def _mask_shape(local: LocalCall, operand: int, inside: torch.Tensor) -> list[int]:
    """The index's dims where they stand in the output."""
    index, output = local.rule.operands[operand], local.rule.outputs[0]
    assert index is not None, "a lookup has an index"
    assert output is not None, "a lookup has an output"
    extents = {term: size for term, size in zip(index.terms, inside.shape, strict=True) if term}
    return [extents.get(term, 1) for term in output.terms]


def _operands(local: LocalCall) -> dict[int, Any]:
    return {position: value for position, (_, _, value) in enumerate(_flat(local.op, local.arguments))}


def _flat(op: Any, arguments: Mapping[str, Any]) -> list[tuple[str, int | None, Any]]:
    """All operands: argument, place in it where it is a list, and tensor."""
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
