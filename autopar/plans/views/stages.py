"""Stages of a pipeline, their schedule and the micro-batches of a plan."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.values import NamedTensor
from autopar.plans.format import bytes_text, percent_text, seconds_text, table
from autopar.plans.record import PlanRecord
from autopar.sharding.assignment import Pipelining
from autopar.sharding.layout.syntax import MicroBatches, schedule_text
from autopar.sharding.pipelining import statements_of

__all__ = ["other_stages", "schedule_rows", "stage_of", "stage_rows", "stage_table"]


def stage_table(plan: PlanRecord) -> list[str]:
    """Return the lines of a table with a row for each stage of a pipeline."""
    head, rows = stage_rows(plan)
    return [head, *table(rows, right=(2, 3, 4, 5, 6, 7))] if rows else []


def stage_rows(plan: PlanRecord) -> tuple[str, list[tuple[str, ...]]]:
    """Return a line about the schedule, and a row for each stage: what it begins with, its times, its memory."""
    stages, pipelining = plan.costs.stages, plan.decided.assignment.pipelining
    if pipelining is None:
        return "", []
    begins = ["", *statements_of(pipelining)[1].before]
    busiest = max(stages, key=lambda stage: stage.busy_seconds)
    rows: list[tuple[str, ...]] = [
        ("stage", "begins at", "forward", "backward", "busy", "sends", "in flight", "memory")
    ]
    for number, stage in enumerate(stages):
        first = ", ".join(begins[part] or "the inputs" for part in stage.parts)
        busy = percent_text(stage.busy_seconds / (plan.step_seconds or 1.0))
        times = seconds_text(stage.forward_seconds), seconds_text(stage.backward_seconds), busy
        # Activations forward, and the gradients of those received backward.
        sends, size = bytes_text(stage.sent_bytes + stage.received_bytes), bytes_text(stage.memory.peak_bytes)
        rows.append((f"{number}", first, *times, sends, f"{stage.in_flight:g}", size))
    bubble = plan.costs.bubble_seconds / (plan.step_seconds or 1.0)
    assert plan.decided.micro is not None, "stages run micro-batches"
    head = f"{_schedule_text(pipelining)} on {pipelining.axis}, {plan.decided.micro.count} micro-batches: "
    head += f"stage {stages.index(busiest)} is the busiest"
    return f"{head}, which waits {percent_text(bubble)} of the step", rows


def schedule_rows(plans: Sequence[PlanRecord]) -> list[tuple[str, ...]]:
    """Return rows with the stages and the micro-batches of plans, where one has some."""
    rows: list[tuple[str, ...]] = []
    pipelines = [plan.decided.assignment.pipelining for plan in plans]
    if any(one is not None for one in pipelines):
        texts = ("-" if one is None else f"{one.stages}, {_schedule_text(one)}" for one in pipelines)
        rows.append(("stages", *texts))
    if any(plan.decided.micro is not None for plan in plans):
        rows.append(("micro-batches", *(_micro_text(plan.decided.micro) for plan in plans)))
    return rows


def _micro_text(micro: MicroBatches | None) -> str:
    return "1" if micro is None else f"{micro.count}, in halves" if micro.halves else str(micro.count)


def other_stages(one: PlanRecord, other: PlanRecord) -> str:
    """Return what differs between two plans in time: stages or micro-batches; empty if nothing does."""
    if one.decided.assignment.pipelining != other.decided.assignment.pipelining:
        return ", and other stages"
    return ", and other micro-batches" if one.decided.micro != other.decided.micro else ""


def stage_of(plan: PlanRecord, tensor: NamedTensor) -> str | None:
    """Return the stage that stores or makes a tensor, and those that it is sent to; None without a pipeline."""
    pipelining = plan.decided.assignment.pipelining
    if pipelining is None:
        return None
    parts, count = pipelining.parts, pipelining.stages
    readers = (node.name for node in plan.graph.nodes if tensor.name in node.operands)
    read = {parts[name] % count for name in readers if name in parts}
    if tensor.kind == "param":
        own = pipelining.held.get(tensor.name)
        text = f"stored on stage {own} of {count}"
    else:
        made = (node.name for node in plan.graph.nodes if tensor.name in node.outputs)
        part = next((parts[name] for name in made if name in parts), None)
        own = None if part is None else part % count
        text = f"made on stage {own} of {count}"
    if own is None:
        return f"on all {count} stages" if tensor.kind in ("param", "input") else "computed on the stages that read it"
    others = sorted(read - {own})
    return text if not others else f"{text}, and sent to stage {', '.join(map(str, others))}"


def _schedule_text(pipelining: Pipelining) -> str:
    """Return the schedule as a layout writes it."""
    return schedule_text(pipelining.schedule, pipelining.chunks, pipelining.more)
