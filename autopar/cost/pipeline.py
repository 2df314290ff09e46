"""The time and the memory of a pipeline, from those of its stages: arithmetic for judging plans, nothing runs them yet.

A schedule is, for every stage, the order of its forwards and backwards. The time of a step follows from the orders: a
task begins when its stage has ended the one before it and when what it needs has arrived. The memory follows from them
too: a stage holds the activations of every micro-batch whose forward it has run and whose backward it has not.

    gpipe        all forwards, then all backwards                         Huang et al., 2019
    1f1b         as few forwards ahead as keep all stages busy            Narayanan et al., PipeDream-Flush, 2021
    interleaved  as 1f1b, with several chunks of the model on each stage  Narayanan et al., Megatron-LM, 2021
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import Literal

__all__ = ["PipelineCosts", "Schedule", "StageCosts", "StageTask", "orders", "pipeline"]

Schedule = Literal["gpipe", "1f1b", "interleaved"]


class TaskKind(Enum):
    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True)
class StageCosts:
    """What one stage does for one micro-batch, all its chunks together, and what it holds."""

    forward_seconds: float
    backward_seconds: float
    send_seconds: float = 0.0
    """To hand one micro-batch's activations to the next chunk, or their gradient to the one before."""
    held_bytes: float = 0.0
    """Whatever the schedule: parameters, gradients, optimizer state, temporaries."""
    activation_bytes: float = 0.0
    """Kept from the forward of one micro-batch to its backward."""


@dataclass(frozen=True)
class StageTask:
    """A forward or a backward of one chunk for one micro-batch."""

    way: TaskKind
    micro_batch: int
    chunk: int = 0


@dataclass(frozen=True)
class PipelineCosts:
    """One step, up to the last backward; what happens once per step comes on top."""

    seconds: float
    busy_seconds: tuple[float, ...]
    """What each stage computes and sends."""
    finished_seconds: tuple[float, ...]
    """When each stage ends its last backward."""
    in_flight: tuple[float, ...]
    """The most micro-batches whose activations each stage holds; a chunk counts as its share of the stage."""
    memory_bytes: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """The time that the busiest stage is idle, as a share of the time that it is busy."""
        return self.seconds / max(self.busy_seconds) - 1


def pipeline(
    stages: Sequence[StageCosts], micro_batches: int, schedule: Schedule = "1f1b", chunks: int = 1
) -> PipelineCosts:
    """The costs of a step of `micro_batches` through these stages, each of `chunks` equal parts."""
    plan = orders(len(stages), micro_batches, schedule, chunks)
    finished, busy = _run(stages, plan, chunks)
    in_flight = tuple(_in_flight(order) / chunks for order in plan)
    memory = tuple(
        stage.held_bytes + count * stage.activation_bytes for stage, count in zip(stages, in_flight, strict=True)
    )
    return PipelineCosts(max(finished), busy, finished, in_flight, memory)


# -- the orders -------------------------------------------------------------------------------------------------------


def orders(stages: int, micro_batches: int, schedule: Schedule, chunks: int = 1) -> tuple[tuple[StageTask, ...], ...]:
    """What each stage does, in order."""
    assert min(stages, micro_batches, chunks) >= 1, f"{stages} stages, {micro_batches} micro-batches, {chunks} chunks"
    assert chunks == 1 or schedule == "interleaved", f"{schedule} has one chunk on each stage, not {chunks}"
    assert chunks == 1 or micro_batches % stages == 0, f"{micro_batches} micro-batches do not interleave on {stages}"
    count = micro_batches * chunks
    forwards = [_task(TaskKind.FORWARD, i, stages, chunks) for i in range(count)]
    backwards = [_task(TaskKind.BACKWARD, i, stages, chunks) for i in range(count)]
    return tuple(
        _alternating(forwards, backwards, _ahead(stage, stages, count, schedule, chunks)) for stage in range(stages)
    )


def _task(way: TaskKind, position: int, stages: int, chunks: int) -> StageTask:
    """The task at a position: one chunk for as many micro-batches as there are stages, then the next chunk."""
    if chunks == 1:
        return StageTask(way, position)
    turn, within = divmod(position, stages * chunks)
    chunk, offset = divmod(within, stages)
    return StageTask(way, turn * stages + offset, chunk if way is TaskKind.FORWARD else chunks - 1 - chunk)


def _ahead(stage: int, stages: int, count: int, schedule: Schedule, chunks: int) -> int:
    """How many forwards a stage runs before it turns to one forward, one backward."""
    if schedule == "gpipe":
        return count
    if chunks == 1:
        return min(count, stages - stage - 1)
    return min(count, 2 * (stages - stage - 1) + (chunks - 1) * stages)


def _alternating(forwards: list[StageTask], backwards: list[StageTask], ahead: int) -> tuple[StageTask, ...]:
    order = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        order += [forward, backward]
    return (*order, *backwards[len(forwards) - ahead :])


def _in_flight(order: Sequence[StageTask]) -> int:
    return max(accumulate(1 if task.way is TaskKind.FORWARD else -1 for task in order))


# -- the clock --------------------------------------------------------------------------------------------------------


def _run(
    stages: Sequence[StageCosts], plan: Sequence[Sequence[StageTask]], chunks: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """When each stage ends, and how long it was busy; a stage goes on as far as what has arrived lets it."""
    arrived: dict[tuple[int, StageTask], float] = {}
    clock, busy = [0.0] * len(stages), [0.0] * len(stages)
    place = [0] * len(stages)
    waiting = list(range(len(stages)))
    while waiting:
        stage = waiting.pop()
        order = plan[stage]
        while place[stage] < len(order):
            task = order[place[stage]]
            ready = 0.0 if _is_source(stage, task) else arrived.pop((stage, task), None)
            if ready is None:
                break
            costs = stages[stage]
            whole = costs.forward_seconds if task.way is TaskKind.FORWARD else costs.backward_seconds
            follower = _follower(stage, task, len(stages), chunks)
            sends = follower is not None and follower[0] != stage
            seconds = whole / chunks + (costs.send_seconds if sends else 0.0)
            clock[stage] = max(clock[stage], ready) + seconds
            busy[stage] += seconds
            place[stage] += 1
            if follower is not None:
                arrived[follower] = clock[stage]
                if sends:
                    waiting.append(follower[0])
    stuck = [stage for stage in range(len(stages)) if place[stage] < len(plan[stage])]
    assert not stuck, f"the stages {stuck} wait for what never comes"
    return tuple(clock), tuple(busy)


def _is_source(stage: int, task: StageTask) -> bool:
    return task.way is TaskKind.FORWARD and stage == 0 and task.chunk == 0


def _follower(stage: int, task: StageTask, stages: int, chunks: int) -> tuple[int, StageTask] | None:
    """The task that needs the result of this one, and its stage."""
    part = task.chunk * stages + stage
    if task.way is TaskKind.FORWARD:
        if part + 1 == stages * chunks:
            return stage, StageTask(TaskKind.BACKWARD, task.micro_batch, task.chunk)
        return (part + 1) % stages, StageTask(TaskKind.FORWARD, task.micro_batch, (part + 1) // stages)
    if part == 0:
        return None
    return (part - 1) % stages, StageTask(TaskKind.BACKWARD, task.micro_batch, (part - 1) // stages)
