"""Time and memory of the stages of a pipeline, from the parts of the model that each runs.

Parts have times of their own. A stage gathers its parameters before its first forward and reduces their gradients after
its last backward; the ranks send activations beside the compute. The orders are those that the ranks run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cost.hardware.cluster import Cluster
from autopar.cost.lowered_step import LoweredStep
from autopar.cost.memory.peak import MemoryCosts, memory
from autopar.cost.network import Network
from autopar.cost.pipeline import OrderTimes, PartCosts, most_in_flight, run_orders
from autopar.sharding.schedules import StageTask, orders

__all__ = ["PartTimes", "PricedStage", "parts_by_stage", "pipelined", "task_times"]


@dataclass(frozen=True)
class PartTimes:
    """Seconds of one part: of a micro-batch, and once in a step before and after all of them."""

    forward: float
    backward: float
    before: float
    after: float
    optimizer: float


@dataclass(frozen=True)
class PricedStage:
    """Time and memory of one stage in a step."""

    # Places of its parts in the model.
    parts: tuple[int, ...]
    # One micro-batch, all parts.
    forward_seconds: float
    backward_seconds: float
    # All micro-batches.
    busy_seconds: float
    # Gathers before the first forward, reductions after the last backward.
    parameters_seconds: float
    # End of the last backward.
    finished_seconds: float
    # Activations of a micro-batch that it sends to later stages, and those that it receives.
    sent_bytes: float
    received_bytes: float
    # Most micro-batches with activations at once.
    in_flight: float
    memory: MemoryCosts


def pipelined(step: LoweredStep, cluster: Cluster, times: Sequence[PartTimes]) -> tuple[float, tuple[PricedStage, ...]]:
    """Return the seconds of a step and the costs of each stage, given the times of the parts."""
    pipelining = step.plan.assignment.pipelining
    assert pipelining is not None, "a pipeline has stages"
    own = parts_by_stage(step, times)
    begins, ends, optimizer = (
        [sum(getattr(times[part], when) for part in mine) for mine in own] for when in ("before", "after", "optimizer")
    )
    sent, received = _sent_bytes(step, len(times))
    finished, busy, _ = task_times(step, cluster, times)
    in_flight = most_in_flight(_tasks(step), pipelining.chunks)
    found = tuple(
        PricedStage(
            tuple(mine),
            sum(times[part].forward for part in mine),
            sum(times[part].backward for part in mine),
            busy[stage],
            begins[stage] + ends[stage],
            finished[stage],
            sum(sent[part] for part in mine),
            sum(received[part] for part in mine),
            in_flight[stage],
            memory(step.at(stage), in_flight[stage]),
        )
        for stage, mine in enumerate(own)
    )
    return max(end + last for end, last in zip(finished, ends, strict=True)) + max(optimizer), found


def parts_by_stage(step: LoweredStep, times: Sequence[PartTimes]) -> list[range]:
    """Return the parts of each stage."""
    pipelining = step.plan.assignment.pipelining
    assert pipelining is not None, "a pipeline has stages"
    return [range(stage, len(times), pipelining.stages) for stage in range(pipelining.stages)]


def task_times(step: LoweredStep, cluster: Cluster, times: Sequence[PartTimes]) -> OrderTimes:
    """Return the times of the forwards and backwards of all stages."""
    plan, pipelining = step.plan, step.plan.assignment.pipelining
    assert pipelining is not None, "a pipeline has stages"
    network = Network(cluster, pipelining.mesh, plan.options.links)
    sent, _ = _sent_bytes(step, len(times))
    sends = [network.seconds("send", (pipelining.axis,), size) if size else 0.0 for size in sent]
    parts = [PartCosts(one.forward, one.backward, send) for one, send in zip(times, sends, strict=True)]
    begins = [sum(times[part].before for part in mine) for mine in parts_by_stage(step, times)]
    return run_orders(parts, _tasks(step), begins, sends_wait=False)


def _tasks(step: LoweredStep) -> tuple[tuple[StageTask, ...], ...]:
    one = step.plan.assignment.pipelining
    assert one is not None, "a pipeline has stages"
    return orders(one.stages, step.plan.options.micro_batches, one.schedule, one.chunks, one.more)


def _sent_bytes(step: LoweredStep, parts: int) -> tuple[list[float], list[float]]:
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
