"""Steps of a reshard on one rank: pack the buffer of a collective, and unpack its result.

A `LocalStep` is a step bound to a rank's coordinate. It holds numbers only, so `torch.compile` traces through it. All
tensors here have the local atoms as their dims. A collective works on a flat buffer with the members' parts one after
the other: `prepare` packs it, the transport exchanges it, `finish` unpacks it. Pieces of unequal length are padded to
the longest where a collective needs equal ones; an all-to-all does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

import torch
from torch import Tensor

from autopar.lowering.collectives.level_groups import LevelGroups
from autopar.rules.shard_call.local_call import kept
from autopar.sharding.reshard.reshard import LOCAL, Reshard, Step, StepKind
from autopar.sharding.sharding import Piece

__all__ = ["LocalStep", "bind", "finish", "keep_local", "prepare"]


@dataclass(frozen=True)
class LocalStep:
    """Step on one rank; `before` and `after` are sizes of local atoms, `atom` is the one that it splits or joins.

    Lists over the members of the group are in rank order. `pieces`: the part of this rank's tensor that each member
    takes along `to_atom` (all-to-all) or `atom`, or adds to it (all-gather). `shapes`: the part that each sends back.
    `order`: the members by the place of their pieces along `atom`. `direct`: the tensor in memory is the buffer
    already. `group`: name of the process group.
    """

    kind: StepKind
    before: tuple[int, ...]
    after: tuple[int, ...]
    atom: int = 0
    to_atom: int = 0
    keep: bool = True
    start: int = 0
    longest: int = 0
    direct: bool = False
    pieces: tuple[Piece, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    order: tuple[int, ...] = ()
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    group: str = ""
    # Groups of an all-reduce that runs by level, for buffers of some sizes.
    levels: tuple[LevelGroups, ...] = ()

    @property
    def local(self) -> bool:
        """Return whether the step sends nothing."""
        return self.kind in LOCAL

    @property
    def ranks(self) -> int:
        return len(self.order)

    def level_of(self, buffer_bytes: int) -> LevelGroups | None:
        """Return the groups of an all-reduce of a buffer that runs by level; None for one collective."""
        return next((one for one in self.levels if one.least_bytes <= buffer_bytes <= one.most_bytes), None)


def bind(
    step: Step, reshard: Reshard, coordinate: Mapping[str, int], members: tuple[Mapping[str, int], ...]
) -> LocalStep:
    """Return a step as the rank at `coordinate` runs it; `members` are the coordinates of its group, in rank order.

    The caller adds the name of the process group.
    """
    atoms, axes = reshard.atoms, reshard.axes
    here = {axis: coordinate[axis] for axis in axes}
    before = step.before.pieces(atoms, axes, here)
    after = step.after.pieces(atoms, axes, here)
    atom = step.atom or 0
    move = LocalStep(step.kind, _lengths(before), _lengths(after), atom)
    if step.kind in (StepKind.ALL_REDUCE, StepKind.KEEP_ONE):
        keep = all(coordinate[axis] == 0 for axis in step.axes)
        return replace(move, keep=keep, order=tuple(range(len(members))))
    if step.local:
        return replace(move, start=abs(after[atom][0] - before[atom][0]))
    held = [step.before.pieces(atoms, axes, here | dict(member)) for member in members]
    wanted = [step.after.pieces(atoms, axes, here | dict(member)) for member in members]
    if step.kind is StepKind.ALL_TO_ALL:
        return _all_to_all(move, step, (before, after), held, wanted)
    # Gathered, the members' pieces make up this rank's after; scattered, they are cut from its before.
    parts, whole = (held, after) if step.kind is StepKind.ALL_GATHER else (wanted, before)
    pieces = tuple((part[atom][0] - whole[atom][0], part[atom][1]) for part in parts)
    order = _order(parts, atom)
    longest = max(length for _, length in pieces)
    even = all(length == longest for _, length in pieces)
    direct = even and order == tuple(range(len(members))) and _leading(move.before, atom)
    return replace(move, longest=longest, direct=direct, pieces=pieces, order=order)


def _all_to_all(
    move: LocalStep,
    step: Step,
    mine: tuple[tuple[Piece, ...], tuple[Piece, ...]],
    held: list[tuple[Piece, ...]],
    wanted: list[tuple[Piece, ...]],
) -> LocalStep:
    assert step.to_atom is not None, f"{step} goes nowhere"
    before, after = mine
    atom, to_atom = move.atom, step.to_atom
    pieces = tuple(_shared(before[to_atom], part[to_atom]) for part in wanted)
    shapes = tuple(_replaced(move.after, atom, _shared(part[atom], after[atom])[1]) for part in held)
    return replace(
        move,
        to_atom=to_atom,
        direct=_leading(move.before, to_atom) and all(one[0] + one[1] == other[0] for one, other in pairwise(pieces)),
        pieces=pieces,
        shapes=shapes,
        order=_order(held, atom),
        sent=tuple(prod(_replaced(move.before, to_atom, length)) for _, length in pieces),
        received=tuple(map(prod, shapes)),
    )


def _lengths(pieces: tuple[Piece, ...]) -> tuple[int, ...]:
    return tuple(length for _, length in pieces)


def _replaced(sizes: tuple[int, ...], atom: int, length: int) -> tuple[int, ...]:
    return (*sizes[:atom], length, *sizes[atom + 1 :])


def _leading(sizes: tuple[int, ...], atom: int) -> bool:
    """Return whether pieces along this atom are contiguous in memory."""
    return all(size == 1 for size in sizes[:atom])


def _order(members: list[tuple[Piece, ...]], atom: int) -> tuple[int, ...]:
    return tuple(sorted(range(len(members)), key=lambda member: members[member][atom]))


def _shared(mine: Piece, other: Piece) -> Piece:
    """Return the intersection of two pieces, counted from the start of the first."""
    start = max(mine[0], other[0])
    length = min(mine[0] + mine[1], other[0] + other[1]) - start
    return (start - mine[0], length) if length > 0 else (0, 0)


# -- on tensors -------------------------------------------------------------------------------------------------------


def keep_local(move: LocalStep, x: Tensor) -> Tensor:
    """Run a step that sends nothing."""
    if move.kind is StepKind.KEEP_ONE:
        if torch.compiler.is_compiling():
            return kept(x, move.before, move.keep)
        return x if move.keep else torch.zeros_like(x)
    if move.kind is StepKind.SLICE:
        # A copy: a view would keep the whole tensor in memory for as long as the slice lives.
        piece = x.narrow(move.atom, move.start, move.after[move.atom])
        return piece.clone(memory_format=torch.contiguous_format)
    left, right = move.start, move.after[move.atom] - move.before[move.atom] - move.start
    return _padded(x, move.atom, left, right)


def _padded(x: Tensor, atom: int, left: int, right: int) -> Tensor:
    if not left and not right:
        return x
    if x.shape[atom] == 0 and torch.compiler.is_compiling():
        return kept(x, _replaced(tuple(x.shape), atom, left + right), False)
    parts = [x.new_zeros(_replaced(tuple(x.shape), atom, length)) for length in (left, right)]
    return torch.cat([parts[0], x, parts[1]], atom)


def prepare(move: LocalStep, x: Tensor) -> Tensor:
    """Pack the buffer that this rank gives to the collective."""
    if move.kind is StepKind.ALL_GATHER:
        x = _padded(x, move.atom, 0, move.longest - move.before[move.atom])
    elif move.kind is StepKind.REDUCE_SCATTER and not move.direct:
        pieces = [x.narrow(move.atom, start, length) for start, length in move.pieces]
        x = torch.cat([_padded(piece, move.atom, 0, move.longest - piece.shape[move.atom]) for piece in pieces])
    elif move.kind is StepKind.ALL_TO_ALL and not move.direct:
        x = torch.cat([x.narrow(move.to_atom, start, length).reshape(-1) for start, length in move.pieces])
    flat = x.reshape(-1).contiguous()
    # A conjugate is a mark on the same memory, which would be sent without it.
    return flat.resolve_conj() if flat.is_complex() else flat.resolve_neg()


def finish(move: LocalStep, buffer: Tensor) -> Tensor:
    """Unpack this rank's tensor from the result of the collective."""
    if move.kind is StepKind.REDUCE_SCATTER and move.longest > move.after[move.atom]:
        padded = buffer.reshape(_replaced(move.after, move.atom, move.longest))
        return padded.narrow(move.atom, 0, move.after[move.atom]).contiguous()
    if move.kind is StepKind.ALL_GATHER and not move.direct:
        parts = buffer.reshape(move.ranks, *_replaced(move.before, move.atom, move.longest)).unbind()
        return torch.cat([parts[i].narrow(move.atom, 0, move.pieces[i][1]) for i in move.order], move.atom)
    if move.kind is StepKind.ALL_TO_ALL:
        received = torch.split(buffer, list(move.received))
        return torch.cat([received[i].reshape(move.shapes[i]) for i in move.order], move.atom)
    # A slice of a bucket's buffer may be strided, and some kernels (backward of BatchNorm) read weights as contiguous.
    return buffer.reshape(move.after).contiguous()
