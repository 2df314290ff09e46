"""Schedules of a pipeline: the order of forwards and backwards of each stage.

A stage runs one part of the model, or several of them if the schedule interleaves. A task begins when its stage has
ended the task before it and its input has arrived. What the cost model prices and what the ranks run are these orders.

    gpipe        all forwards, then all backwards                         Huang et al., 2019
    1f1b         as few forwards ahead as keep all stages busy            Narayanan et al., PipeDream-Flush, 2021
    interleaved  as 1f1b, with several chunks of the model on each stage  Narayanan et al., Megatron-LM, 2021
    zero_bubble  as 1f1b, with the gradients of weights put off           Qi et al., 2023 (ZB-H1)

Other stages wait for the gradient of a part's inputs alone. `zero_bubble` computes the gradients of weights later, in
the time in which a stage would wait. Stage s puts off those of s micro-batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal, get_args

__all__ = ["SCHEDULES", "BackwardHalf", "Schedule", "StageTask", "TaskKind", "orders"]

Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)


class TaskKind(Enum):
    FORWARD = "forward"
    BACKWARD = "backward"


class BackwardHalf(Enum):
    INPUTS = "gradient of inputs"
    WEIGHTS = "gradient of weights"


@dataclass(frozen=True)
class StageTask:
    """Forward, backward or half a backward of one chunk for one micro-batch."""

    kind: TaskKind
    micro_batch: int
    chunk: int = 0
    # Half of a backward; None for all of it, and for a forward.
    half: BackwardHalf | None = None


def orders(
    stages: int, micro_batches: int, schedule: Schedule, chunks: int = 1, more: int = 0, halves: bool = False
) -> tuple[tuple[StageTask, ...], ...]:
    """Return the tasks of each stage, in order; `more` micro-batches are in flight beyond those of the schedule.

    With `halves` the backwards of `zero_bubble` are in two halves. Without, they are whole, as in `1f1b`.
    """
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
        order += backwards[count - ahead :]
        found.append(tuple(_halved(order, stage)) if halves and schedule == "zero_bubble" else tuple(order))
    return tuple(found)


def _halved(order: list[StageTask], put_off: int) -> Iterator[StageTask]:
    """Yield the tasks with backwards in two halves; the second one is put off by some micro-batches."""
    waiting: deque[StageTask] = deque()
    for task in order:
        if task.kind is not TaskKind.BACKWARD:
            yield task
            continue
        yield replace(task, half=BackwardHalf.INPUTS)
        waiting.append(replace(task, half=BackwardHalf.WEIGHTS))
        if len(waiting) > put_off:
            yield waiting.popleft()
    yield from waiting


def _task(kind: TaskKind, position: int, stages: int, chunks: int) -> StageTask:
    """Return the task at a position of a stage's forwards or backwards."""
    if chunks == 1:
        return StageTask(kind, position)
    # One chunk runs as many micro-batches as there are stages, then the next chunk.
    turn, within = divmod(position, stages * chunks)
    chunk, offset = divmod(within, stages)
    return StageTask(kind, turn * stages + offset, chunk if kind is TaskKind.FORWARD else chunks - 1 - chunk)
