"""Orders of tasks against those of torch.distributed.pipelining, and their length in steps of equal time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, product
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as peer

from autopar.sharding.schedules import BackwardHalf, Schedule, StageTask, TaskKind, orders, reductions_after


def order_of_torch(stages: int, micro_batches: int, chunks: int, rank: int) -> list[tuple[bool, int, int]]:
    """Forward or not, part and micro-batch of each task, without process groups."""
    made: Any = object.__new__(peer.ScheduleInterleaved1F1B)
    made.n_local_stages, made.pp_group_size, made._n_microbatches = chunks, stages, micro_batches
    rounds = max(1, micro_batches // stages)
    made.microbatches_per_round = micro_batches // rounds
    actions = made._calculate_single_rank_operations(rank)
    return [
        (one.computation_type == peer.FORWARD, one.stage_index, one.microbatch_index)
        for one in actions
        if one is not None
    ]


@pytest.mark.parametrize(
    ("stages", "micro_batches", "chunks"), [(2, 4, 2), (4, 8, 2), (4, 4, 3), (8, 32, 2), (3, 9, 4)]
)
def test_interleaved_is_that_of_torch(stages: int, micro_batches: int, chunks: int) -> None:
    for rank, order in enumerate(orders(stages, micro_batches, "interleaved", chunks)):
        ours = [(task.kind is TaskKind.FORWARD, task.chunk * stages + rank, task.micro_batch) for task in order]
        assert ours == order_of_torch(stages, micro_batches, chunks, rank)


def test_more_in_flight() -> None:
    for stage, order in enumerate(orders(3, 8, "1f1b", more=1)):
        kinds = [task.kind for task in order]
        # One forward more than the stages behind this one, then a forward before each backward.
        assert kinds.index(TaskKind.BACKWARD) == 3 - stage - 1 + 2
        assert kinds.count(TaskKind.FORWARD) == kinds.count(TaskKind.BACKWARD) == 8


# -- the backward in two halves ----------------------------------------------------------------------------------------

KINDS = {peer.FORWARD: (TaskKind.FORWARD, None)}
KINDS[peer.BACKWARD_INPUT] = TaskKind.BACKWARD, BackwardHalf.INPUTS
KINDS[peer.BACKWARD_WEIGHT] = TaskKind.BACKWARD, BackwardHalf.WEIGHTS


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 4), (4, 8), (4, 4), (8, 32)])
def test_zero_bubble_is_that_of_torch(stages: int, micro_batches: int) -> None:
    made: Any = object.__new__(peer.ScheduleInterleavedZeroBubble)
    made.n_local_stages, made.pp_group_size, made._n_microbatches = 1, stages, micro_batches
    made.microbatches_per_round = micro_batches // max(1, micro_batches // stages)
    for rank, order in enumerate(orders(stages, micro_batches, "zero_bubble", halves=True)):
        actions = [one for one in made._calculate_single_rank_operations(rank) if one is not None]
        theirs = [(*KINDS[one.computation_type], one.microbatch_index) for one in actions]
        assert [(task.kind, task.half, task.micro_batch) for task in order] == theirs


def times(plan: Sequence[Sequence[StageTask]], forward: int = 1, inputs: int = 1, weights: int = 1) -> list[int]:
    """The end of each stage's last task; messages take no time. Raises if a stage waits forever."""
    stages = len(plan)
    ends: dict[tuple[TaskKind, int, int], int] = {}
    clock, left = [0] * stages, [list(reversed(order)) for order in plan]
    while any(left):
        moved = False
        for stage, tasks in enumerate(left):
            while tasks:
                task = tasks[-1]
                part = task.chunk * stages + stage
                last = max(one.chunk for one in plan[0]) * stages + stages - 1
                needed = [(TaskKind.FORWARD, part, task.micro_batch)] if task.kind is TaskKind.BACKWARD else []
                if task.half is BackwardHalf.WEIGHTS:
                    needed.append((TaskKind.BACKWARD, part, task.micro_batch))
                elif task.kind is TaskKind.BACKWARD and part < last:
                    needed.append((TaskKind.BACKWARD, part + 1, task.micro_batch))
                elif task.kind is TaskKind.FORWARD and part:
                    needed.append((TaskKind.FORWARD, part - 1, task.micro_batch))
                if any(one not in ends for one in needed):
                    break
                halves = {None: inputs + weights, BackwardHalf.INPUTS: inputs, BackwardHalf.WEIGHTS: weights}
                seconds = forward if task.kind is TaskKind.FORWARD else halves[task.half]
                clock[stage] = max([clock[stage], *(ends[one] for one in needed)]) + seconds
                if task.half is not BackwardHalf.WEIGHTS:
                    ends[task.kind, part, task.micro_batch] = clock[stage]
                tasks.pop()
                moved = True
        assert moved, "a deadlock"
    return clock


SCHEDULES: list[tuple[Schedule, int, int]] = [
    ("gpipe", 1, 0),
    ("1f1b", 1, 0),
    ("1f1b", 1, 2),
    ("interleaved", 2, 0),
    ("interleaved", 3, 0),
    ("zero_bubble", 1, 0),
]


@pytest.mark.parametrize(("schedule", "chunks", "more"), SCHEDULES)
def test_every_order_ends(schedule: Schedule, chunks: int, more: int) -> None:
    """Each stage has each task once, with its own forward before its backward and its halves in order."""
    for stages, micro_batches in product(range(1, 9), range(1, 33)):
        if chunks > 1 and micro_batches % stages:
            continue
        plan = orders(stages, micro_batches, schedule, chunks, more, halves=True)
        halves = 3 if schedule == "zero_bubble" else 2
        for order in plan:
            assert len(set(order)) == len(order) == halves * chunks * micro_batches
        assert min(times(plan)) >= 3 * chunks * micro_batches


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("micro_batches", [8, 32])
def test_what_zero_bubble_saves(stages: int, micro_batches: int) -> None:
    """The idle time of `1f1b` is that of S - 1 forwards and backwards; weights' gradients leave it, and fill it."""
    for forward, inputs, weights in ((1, 1, 1), (2, 3, 2), (5, 4, 3)):
        busy = micro_batches * (forward + inputs + weights)
        whole = times(orders(stages, micro_batches, "1f1b", halves=True), forward, inputs, weights)
        halved = times(orders(stages, micro_batches, "zero_bubble", halves=True), forward, inputs, weights)
        assert max(whole) - busy == (stages - 1) * (forward + inputs + weights)
        assert max(halved) - busy == (stages - 1) * (forward + inputs - weights)


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 4), (2, 4), (4, 8), (4, 3), (8, 32)])
def test_in_flight(stages: int, micro_batches: int) -> None:
    """Zero bubble has the micro-batches of `1f1b` in flight, and beside them put-off operands: S at most in all."""
    for stage, order in enumerate(orders(stages, micro_batches, "zero_bubble", halves=True)):
        change: dict[str, list[int]] = defaultdict(list)
        for task in order:
            ends = task.half is BackwardHalf.WEIGHTS
            change["alive"].append(1 if task.kind is TaskKind.FORWARD else 0 if ends else -1)
            change["late"].append(-1 if ends else int(task.half is BackwardHalf.INPUTS))
        alive, late = (list(accumulate(change[name])) for name in ("alive", "late"))
        assert max(alive) == min(micro_batches, stages - stage)
        assert max(late) == min(micro_batches, stage + 1)
        assert max(map(sum, zip(alive, late, strict=True))) <= stages


@pytest.mark.parametrize(("stages", "micro_batches", "chunks"), [(4, 4, 2), (4, 12, 3), (8, 16, 2)])
def test_stages_reduce_together_where_chunks_interleave(stages: int, micro_batches: int, chunks: int) -> None:
    """Stages are so many backwards ahead of the first one, and wait for it with all chunks but the last one."""
    for stage, order in enumerate(orders(stages, micro_batches, "interleaved", chunks)):
        backwards = [task for task in order if task.kind is TaskKind.BACKWARD]
        after = reductions_after(order, stage)
        assert set(after) == (set(range(1, chunks)) if stage else set())
        for chunk, task in after.items():
            last = max(place for place, each in enumerate(backwards) if each.chunk == chunk)
            assert backwards.index(task) == last + stage - 1
    for order in orders(stages, micro_batches, "1f1b"):
        assert not reductions_after(order, 1)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zero_bubble"])
def test_turns_reduce_each_chunk_once(schedule: Schedule) -> None:
    chunks = 3 if schedule == "interleaved" else 1
    turns = orders(4, 8, schedule, chunks, halves=True).turns
    for stage in range(4):
        own = [turn for turn in turns if turn.stage == stage]
        assert sorted(turn.reduced for turn in own if turn.reduced >= 0) == list(range(chunks))
        for place, turn in enumerate(own):
            if turn.reduced >= 0:
                rest = own[place + 1 :] if turn.reduced == turn.task.chunk else own[place:]
                assert all(each.task.chunk != turn.reduced or each.task.kind is TaskKind.FORWARD for each in rest)
