"""All ranks of a mesh in one process: the steps of a reshard run on a list of local tensors."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations, product
from typing import Any

import torch
from torch import Tensor

from autopar.lowering.collectives.local_steps import bind, finish, keep_local, prepare
from autopar.sharding.reshard.reshard import Reshard, Step, StepKind
from autopar.sharding.sharding import Atoms, Sharding, coordinates
from tests.gloo import added


def all_layouts(atoms: Atoms, axes: Mapping[str, int]) -> Iterator[Sharding]:
    """Every layout that there is, with every order of axes on one atom."""
    count = len(atoms.sizes)
    for states in product([*range(count), "R", "B", "P"], repeat=len(axes)):
        where = dict(zip(axes, states, strict=True))
        held = [tuple(axis for axis in axes if where[axis] == atom) for atom in range(count)]
        marks = [frozenset(axis for axis in axes if where[axis] == mark) for mark in "PB"]
        for splits in product(*(permutations(split) for split in held)):
            yield Sharding(splits, *marks)


def drawn_sharding(rng: random.Random, axes: Sequence[str], atoms: int) -> Sharding:
    """A sharding in which each axis splits an atom, is partial, or does nothing."""
    splits: list[tuple[str, ...]] = [()] * atoms
    partial = set()
    for axis in rng.sample(axes, len(axes)):
        place = rng.randrange(-2, atoms)
        if place >= 0:
            splits[place] = (*splits[place], axis)
        elif place == -1:
            partial.add(axis)
    return Sharding(tuple(splits), frozenset(partial))


def groups(axes: Mapping[str, int], over: Sequence[str]) -> list[list[int]]:
    """Ranks that differ along these axes only, in the order of the mesh."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank, coordinate in enumerate(coordinates(axes)):
        found.setdefault(tuple(at for axis, at in coordinate.items() if axis not in over), []).append(rank)
    return list(found.values())


def scatter(value: Tensor, layout: Sharding, atoms: Atoms, axes: Mapping[str, int]) -> list[Tensor]:
    """Local tensors that stand for a global value: summands of a partial one are drawn at random."""
    places = list(coordinates(axes))
    summands: dict[tuple[int, ...], Tensor] = {}
    for indices in product(*(range(axes[axis]) for axis in sorted(layout.partial))):
        summands[indices] = torch.randn(value.shape, dtype=value.dtype)
    first = next(iter(summands))
    summands[first] = value - sum((part for key, part in summands.items() if key != first), torch.zeros_like(value))
    local = []
    for place in places:
        part = summands[tuple(place[axis] for axis in sorted(layout.partial))].reshape(atoms.sizes)
        pieces = layout.pieces(atoms, axes, place)
        for atom, (start, length) in enumerate(pieces):
            part = part.narrow(atom, start, length)
        local.append(part.reshape(atoms.fold(tuple(length for _, length in pieces))).clone())
    return local


def gather(local: Sequence[Tensor], layout: Sharding, atoms: Atoms, axes: Mapping[str, int]) -> Tensor:
    """The global value; ranks that must agree are asserted to."""
    places = list(coordinates(axes))
    split = {axis for cut in layout.splits for axis in cut}
    same = [axis for axis in axes if axis not in layout.partial and axis not in split]
    value = torch.zeros(atoms.sizes, dtype=local[0].dtype)
    for place, part in zip(places, local, strict=True):
        pieces = layout.pieces(atoms, axes, place)
        lengths = tuple(length for _, length in pieces)
        assert tuple(part.shape) == atoms.fold(lengths), f"{tuple(part.shape)} at {place} in {layout}"
        twin = local[places.index(place | dict.fromkeys(same, 0))]
        torch.testing.assert_close(part, twin, rtol=1e-12, atol=1e-12, equal_nan=True)
        if twin is part:
            view = value
            for atom, (start, length) in enumerate(pieces):
                view = view.narrow(atom, start, length)
            view += part.reshape(lengths)
    return value.reshape(atoms.shape)


def run(
    reshard: Reshard, steps: Sequence[Step], local: Sequence[Tensor], flip: bool = False
) -> tuple[list[Tensor], list[int]]:
    """The local tensors after the steps, and what the busiest rank has sent in each; `flip` turns the groups round."""
    axes = dict(reshard.axes)
    places = list(coordinates(axes))
    layouts = [step.before for step in steps[:1]]
    now = [
        x.reshape(layouts[0].local_sizes(reshard.atoms, axes, place)) if steps else x
        for x, place in zip(local, places, strict=True)
    ]
    sent = []
    for step in steps:
        now, busiest = _run_step(reshard, step, now, flip)
        sent.append(busiest)
    if steps:
        now = [x.reshape(reshard.atoms.fold(tuple(x.shape))) for x in now]
    return now, sent


def _run_step(reshard: Reshard, step: Step, now: list[Tensor], flip: bool) -> tuple[list[Tensor], int]:
    axes = dict(reshard.axes)
    places = list(coordinates(axes))
    after: dict[int, Tensor] = {}
    busiest = 0
    for group in groups(axes, step.axes):
        ranks = group[::-1] if flip else group
        members = tuple({axis: places[rank][axis] for axis in step.axes} for rank in ranks)
        moves = [bind(step, reshard, places[rank], members) for rank in ranks]
        for move, rank in zip(moves, ranks, strict=True):
            assert tuple(now[rank].shape) == move.before
        if step.local:
            results = [keep_local(move, now[rank]) for move, rank in zip(moves, ranks, strict=True)]
        else:
            buffers = [prepare(move, now[rank]) for move, rank in zip(moves, ranks, strict=True)]
            assert all(buffer.is_contiguous() for buffer in buffers)
            received, sent = _collective(step.kind, moves, buffers)
            busiest = max(busiest, sent)
            results = [finish(move, buffer) for move, buffer in zip(moves, received, strict=True)]
        for move, rank, result in zip(moves, ranks, results, strict=True):
            assert tuple(result.shape) == move.after
            assert result.is_contiguous() or not now[rank].is_contiguous(), f"{move.kind} gives a strided tensor"
            after[rank] = result
    return [after[rank] for rank in range(len(places))], busiest


def _collective(kind: StepKind, moves: list[Any], buffers: list[Tensor]) -> tuple[list[Tensor], int]:
    count = len(buffers)
    if kind is StepKind.ALL_TO_ALL:
        parts = [buffer.split(list(move.sent)) for buffer, move in zip(buffers, moves, strict=True)]
        received = [torch.cat([parts[source][target] for source in range(count)]) for target in range(count)]
        for move, got in zip(moves, received, strict=True):
            assert sum(move.received) == got.numel()
        away = [
            [part.numel() for target, part in enumerate(row) if target != source] for source, row in enumerate(parts)
        ]
        return received, max(map(sum, away))
    assert len({(tuple(buffer.shape), buffer.dtype) for buffer in buffers}) == 1, (
        "a collective needs buffers of one kind"
    )
    numel = buffers[0].numel()
    if kind is StepKind.ALL_GATHER:
        return [torch.cat(buffers)] * count, (count - 1) * numel
    total = added(buffers)
    if kind is StepKind.ALL_REDUCE:
        return [total] * count, -(-2 * (count - 1) * numel // count)
    assert kind is StepKind.REDUCE_SCATTER
    return list(total.chunk(count)), (count - 1) * numel // count


class Everywhere(torch.autograd.Function):
    """A reshard on all ranks at once, differentiable: its backward runs the backward steps."""

    @staticmethod
    def forward(ctx: Any, reshard: Reshard, *local: Tensor) -> tuple[Tensor, ...]:
        ctx.reshard = reshard
        return tuple(x.clone() for x in run(reshard, reshard.forward, local)[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *run(ctx.reshard.gradient, ctx.reshard.backward, gradients)[0]
