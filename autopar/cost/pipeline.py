"""Time and memory of a pipeline, from those of its stages or of the parts that they run.

A stage keeps the activations of each micro-batch between its forward and its backward. `pipeline` prices stages of
equal parts from a few numbers. `pipelined` prices the stages of a plan: parts have times of their own. Sends, gathers
of parameters and reductions of their gradients go beside the compute. Tied parameters go from the stage that has them
to the others before, and their gradients back after. The orders are those that the ranks run. Under `zero_bubble` a
stage puts off the gradients of weights, and keeps their operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autopar.cost.hardware.cluster import Cluster
from autopar.cost.lowered_step import LoweredStep
from autopar.cost.memory.peak import MemoryCosts, memory_of_stages
from autopar.cost.network import Network
from autopar.cost.order_times import OrderTimes, PartCosts, run_orders
from autopar.cost.overlap import ChunkTraffic, OverlapCost, StageTraffic
from autopar.cost.unequal_devices import with_slowest_links
from autopar.sharding.schedules import Schedule, StageOrders, most_in_flight, most_kept, orders


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
    # Of the backward, the gradients of weights that `zero_bubble` puts off, and the operands kept for them.
    late_seconds: float = 0.0
    late_bytes: float = 0.0


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
    plan = orders(len(stages), micro_batches, schedule, chunks, halves=True)
    parts = [
        PartCosts(
            stage.forward_seconds / chunks,
            stage.backward_seconds / chunks,
            stage.send_seconds,
            stage.late_seconds / chunks,
        )
        for _ in range(chunks)
        for stage in stages
    ]
    ran = run_orders(parts, plan, [0.0] * len(stages), sends_wait=True)
    memory = tuple(
        stage.resident_bytes + most_kept(order, chunks, stage.activation_bytes, stage.late_bytes)
        for stage, order in zip(stages, plan, strict=True)
    )
    return PipelineCosts(max(ran.finished), ran.busy, ran.finished, most_in_flight(plan, chunks), memory)


# -- stages of a plan -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PartTimes:
    """Seconds of one part: of a micro-batch, and once in a step."""

    forward: float
    backward: float
    # Of the backward, the gradients of weights that the schedule puts off.
    late: float
    # Gathers and reductions beside the micro-batches.
    traffic: ChunkTraffic
    # Reductions after all of them.
    last: float
    optimizer: float


@dataclass(frozen=True)
class PricedStage:
    """Time and memory of one stage in a step."""

    # Places of its parts in the model.
    parts: tuple[int, ...]
    # One micro-batch, all parts.
    forward_seconds: float
    backward_seconds: float
    # Of the backward, the gradients of weights that the schedule puts off.
    late_seconds: float
    # All micro-batches.
    busy_seconds: float
    # Gathers and reductions that happen once, and the time that they make the stage longer.
    parameters_seconds: float
    exposed_seconds: float
    # End of the last backward.
    finished_seconds: float
    # Activations of a micro-batch that it sends to later stages, and those that it receives.
    sent_bytes: float
    received_bytes: float
    # Most micro-batches with activations at once.
    in_flight: float
    memory: MemoryCosts

    @property
    def pass_seconds(self) -> float:
        """Return the time of a micro-batch while all stages compute."""
        return self.forward_seconds + self.backward_seconds


class StepTimes(NamedTuple):
    """Times of all stages in a step, up to the optimizer."""

    ran: OrderTimes
    # By stage: its gathers and reductions, and the end of both them and its tasks.
    traffic: tuple[StageTraffic, ...]
    reduced: tuple[float, ...]


def pipelined(
    step: LoweredStep, cluster: Cluster, times: Sequence[PartTimes], firsts: Sequence[int]
) -> tuple[float, tuple[PricedStage, ...]]:
    """Return the seconds of a step and the costs of each stage, given the times of the parts.

    `firsts` has the first stage that is equal to each.
    """
    pipelining = step.plan.assignment.pipelining
    assert pipelining is not None, "a pipeline has stages"
    own = parts_by_stage(step, times)
    optimizer = [sum(times[part].optimizer for part in mine) for mine in own]
    sent, received = sent_bytes(step, len(times))
    found = step_times(step, cluster, times)
    in_flight = most_in_flight(step.tasks, pipelining.chunks)
    held = memory_of_stages(step, firsts)
    stages = tuple(
        PricedStage(
            tuple(mine),
            sum(times[part].forward for part in mine),
            sum(times[part].backward for part in mine),
            sum(times[part].late for part in mine),
            found.ran.busy[stage],
            sum(sum(times[part].traffic[:2]) + times[part].last for part in mine),
            found.traffic[stage].added_seconds,
            found.ran.finished[stage],
            sum(sent[part] for part in mine),
            sum(received[part] for part in mine),
            in_flight[stage],
            held[stage],
        )
        for stage, mine in enumerate(own)
    )
    return max(found.reduced) + max(optimizer), stages


def parts_by_stage(step: LoweredStep, times: Sequence[PartTimes]) -> list[range]:
    """Return the parts of each stage."""
    pipelining = step.plan.assignment.pipelining
    assert pipelining is not None, "a pipeline has stages"
    return [range(stage, len(times), pipelining.stages) for stage in range(pipelining.stages)]


class TiedSend(NamedTuple):
    """One tied parameter that a stage sends to another one, and gets its gradients back."""

    source: int
    target: int
    seconds: float
    gradient_seconds: float


def step_times(step: LoweredStep, cluster: Cluster, times: Sequence[PartTimes]) -> StepTimes:
    """Return the times of the forwards and backwards of all stages, and of the reductions after them."""
    plan, pipelining = step.plan, step.plan.assignment.pipelining
    assert pipelining is not None, "a pipeline has stages"
    links = plan.options.links
    network = Network(with_slowest_links(cluster, pipelining.mesh, links), pipelining.mesh, links)

    def seconds(size: float) -> float:
        return network.seconds("send", (pipelining.axis,), size) if size else 0.0

    sent, _ = sent_bytes(step, len(times))
    tied = [
        TiedSend(one.source, target, seconds(one.bytes), seconds(one.gradient_bytes))
        for one in step.tied
        for target in one.targets
    ]
    # Each half of a micro-batch is a message of its own.
    messages = 1 if step.half is None else 2
    return run_stages(times, [messages * seconds(size / messages) for size in sent], step.tasks, cluster, tied)


def run_stages(
    times: Sequence[PartTimes],
    sends: Sequence[float],
    plan: StageOrders,
    cluster: Cluster,
    tied: Sequence[TiedSend] = (),
) -> StepTimes:
    """Return the times of all stages in these orders; `sends` are the seconds of sending behind each part."""
    parts = [PartCosts(one.forward, one.backward, send, one.late) for one, send in zip(times, sends, strict=True)]
    own = [range(stage, len(times), len(plan)) for stage in range(len(plan))]
    # A stage that sends tied parameters has gathered all of its own. It sends one after the other.
    sources = {one.source for one in tied}
    gathers = [sum(times[part].traffic.gathers for part in mine) for mine in own]
    begins = [one if stage in sources else 0.0 for stage, one in enumerate(gathers)]
    sending = list(begins)
    for one in tied:
        sending[one.source] += one.seconds
        begins[one.target] = max(begins[one.target], sending[one.source])
    occupied, cores = OverlapCost.of(cluster).occupied, cluster.device.core_fraction
    traffic = tuple(StageTraffic([times[part].traffic for part in mine], occupied) for mine in own)
    last = [sum(times[part].last for part in mine) for mine in own]
    if cores < 1.0:
        # What sends takes cores of what computes: nothing is hidden.
        begins = [max(begin, one.gather_first()) for begin, one in zip(begins, traffic, strict=True)]
        last = [
            rest + sum(times[part].traffic.reductions for part in mine) for rest, mine in zip(last, own, strict=True)
        ]
    ran = run_orders(parts, plan, begins, sends_wait=False, core_fraction=cores, traffic=traffic)
    reducing, sending = list(ran.finished), list(ran.finished)
    for one in tied:
        sending[one.target] += one.gradient_seconds
        reducing[one.source] = max(reducing[one.source], sending[one.target])
    ends = (one.finished(begin, rest) for one, begin, rest in zip(traffic, reducing, last, strict=True))
    return StepTimes(ran, traffic, tuple(ends))


def sent_bytes(step: LoweredStep, parts: int) -> tuple[list[float], list[float]]:
    """Return the bytes that each part sends to later parts, and those that it receives; gradients go the other way."""
    pipelining = step.plan.assignment.pipelining
    assert pipelining is not None, "a pipeline has stages"
    sent, received = [0.0] * parts, [0.0] * parts
    for name, making, reading in step.crossing:
        before = making
        # A part hands on what later parts read too.
        for part in sorted(reading):
            if part % pipelining.stages != before % pipelining.stages:
                sent[before] += step.local_bytes(name)
                received[part] += step.local_bytes(name)
            before = part
    return sent, received
