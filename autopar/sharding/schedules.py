"""Schedules of a pipeline: the order of forwards and backwards of each stage.

A stage runs one part of the model, or several of them if the schedule interleaves. A task begins when its stage has
ended the task before it and its input has arrived. What the cost model prices and what the ranks run are these orders.

    gpipe        all forwards, then all backwards                         Huang et al., 2019
    1f1b         as few forwards ahead as keep all stages busy            Narayanan et al., PipeDream-Flush, 2021
    interleaved  as 1f1b, with several chunks of the model on each stage  Narayanan et al., Megatron-LM, 2021
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal, get_args

__all__ = ["SCHEDULES", "Schedule", "StageTask", "TaskKind", "orders"]

Schedule = Literal["gpipe", "1f1b", "interleaved"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)


class TaskKind(Enum):
    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True)
class StageTask:
    """Forward or backward of one chunk for one micro-batch."""

    kind: TaskKind
    micro_batch: int
    chunk: int = 0


def orders(
    stages: int, micro_batches: int, schedule: Schedule, chunks: int = 1, more: int = 0
) -> tuple[tuple[StageTask, ...], ...]:
    """Return the tasks of each stage, in order; `more` micro-batches are in flight beyond those of the schedule."""
    assert min(stages, micro_batches, chunks) >= 1, f"{stages} stages, {micro_batches} micro-batches, {chunks} chunks"
    assert chunks == 1 or schedule == "interleaved", f"{schedule} has one chunk on each stage, not {chunks}"
    assert chunks == 1 or micro_batches % stages == 0, f"{micro_batches} micro-batches do not interleave on {stages}"
    count = micro_batches * chunks
    forwards = [_task(TaskKind.FORWARD, i, stages, chunks) for i in range(count)]
    backwards = [_task(TaskKind.BACKWARD, i, stages, chunks) for i in range(count)]
    found = []
    for stage in range(stages):
        # Forwards before the stage alternates one forward, one backward.
        ahead = 2 * (stages - stage - 1) + (chunks - 1) * stages if chunks > 1 else stages - stage - 1
        ahead = count if schedule == "gpipe" else min(count, ahead + more)
        order = forwards[:ahead]
        for forward, backward in zip(forwards[ahead:], backwards, strict=False):
            order += [forward, backward]
        found.append((*order, *backwards[count - ahead :]))
    return tuple(found)


def _task(kind: TaskKind, position: int, stages: int, chunks: int) -> StageTask:
    """Return the task at a position of a stage's forwards or backwards."""
    if chunks == 1:
        return StageTask(kind, position)
    # One chunk runs as many micro-batches as there are stages, then the next chunk.
    turn, within = divmod(position, stages * chunks)
    chunk, offset = divmod(within, stages)
    return StageTask(kind, turn * stages + offset, chunk if kind is TaskKind.FORWARD else chunks - 1 - chunk)
