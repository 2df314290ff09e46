"""Time and memory of a pipeline, from those of its stages.

A stage keeps the activations of each micro-batch between its forward and its backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from autopar.sharding.schedules import Schedule, StageTask, TaskKind, orders


@dataclass(frozen=True)
class StageCosts:
    """Time of one stage for one micro-batch, all its chunks together, and its memory."""

    forward_seconds: float
    backward_seconds: float
    # Sending activations to the next chunk, or their gradient to the one before.
    send_seconds: float = 0.0
    # Independent of the schedule: parameters, gradients, optimizer state, temporaries.
    resident_bytes: float = 0.0
    # Saved by the forward of one micro-batch for its backward.
    activation_bytes: float = 0.0


@dataclass(frozen=True)
class PipelineCosts:
    """Time and memory of one step up to the last backward, by stage."""

    seconds: float
    # Compute and sends.
    busy_seconds: tuple[float, ...]
    # End of the last backward.
    finished_seconds: tuple[float, ...]
    # Most micro-batches with activations at once; a chunk counts as its share of the stage.
    in_flight: tuple[float, ...]
    memory_bytes: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """Return idle over busy time of the busiest stage."""
        return self.seconds / max(self.busy_seconds) - 1


def pipeline(
    stages: Sequence[StageCosts], micro_batches: int, schedule: Schedule = "1f1b", chunks: int = 1
) -> PipelineCosts:
    """Return the costs of a step of `micro_batches` through the stages, each of `chunks` equal parts."""
    plan = orders(len(stages), micro_batches, schedule, chunks)
    finished, busy = _simulate(stages, plan, chunks)
    changes = ([1 if task.kind is TaskKind.FORWARD else -1 for task in order] for order in plan)
    in_flight = tuple(max(accumulate(change)) / chunks for change in changes)
    memory = tuple(
        stage.resident_bytes + count * stage.activation_bytes for stage, count in zip(stages, in_flight, strict=True)
    )
    return PipelineCosts(max(finished), busy, finished, in_flight, memory)


def _simulate(
    stages: Sequence[StageCosts], plan: Sequence[Sequence[StageTask]], chunks: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return when each stage ends and how long it is busy; each stage runs until an input is missing."""
    arrived: dict[tuple[int, StageTask], float] = {}
    clock, busy = [0.0] * len(stages), [0.0] * len(stages)
    place = [0] * len(stages)
    waiting = list(range(len(stages)))
    while waiting:
        stage = waiting.pop()
        order = plan[stage]
        while place[stage] < len(order):
            task = order[place[stage]]
            # The first chunk of the first stage takes the inputs of the step.
            from_input = task.kind is TaskKind.FORWARD and stage == 0 and task.chunk == 0
            ready = 0.0 if from_input else arrived.pop((stage, task), None)
            if ready is None:
                break
            costs = stages[stage]
            whole = costs.forward_seconds if task.kind is TaskKind.FORWARD else costs.backward_seconds
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
    assert not stuck, f"deadlock: stages {stuck} wait for inputs that no task sends"
    return tuple(clock), tuple(busy)


def _follower(stage: int, task: StageTask, stages: int, chunks: int) -> tuple[int, StageTask] | None:
    """Return the stage and the task that need the result of a task; None for the last backward."""
    part = task.chunk * stages + stage
    if task.kind is TaskKind.FORWARD:
        if part + 1 == stages * chunks:
            return stage, StageTask(TaskKind.BACKWARD, task.micro_batch, task.chunk)
        return (part + 1) % stages, StageTask(TaskKind.FORWARD, task.micro_batch, (part + 1) // stages)
    if part == 0:
        return None
    return (part - 1) % stages, StageTask(TaskKind.BACKWARD, task.micro_batch, (part - 1) // stages)
