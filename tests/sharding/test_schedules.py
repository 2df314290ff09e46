"""Orders of tasks against those of torch.distributed.pipelining."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.pipelining import schedules as peer

from autopar.sharding.schedules import TaskKind, orders


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
