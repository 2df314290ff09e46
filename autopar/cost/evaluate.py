"""Price of a plan: `evaluate(graph, plan, cluster)` returns time and memory of one step.

    step = compute + communication of values + exposed communication of parameters + copies + waiting + meetings
    copies = max(0, copies to the host - forward compute) + max(0, copies back - backward compute), of offloaded layers
    exposed = max(0, gathers - η forward compute) + max(0, reductions - η backward compute) + κ overlapped

An op waits for the values that are sent to it. Parameters are gathered ahead of their use and their gradients are
reduced in parallel with the backward. This overlap is limited by η, the share of the compute time that the library can
use (`overlap_fraction`). Overlapped communication slows the compute by κ, the share of the processors that it occupies.
Communication that happens once per step (a gathered copy that stays, a reduction in the last micro-batch) overlaps with
one micro-batch; communication in every micro-batch overlaps with all. In a pipeline, communication once per step
overlaps with the tasks and the waiting of its stage (`overlap`). An eager program launches its kernels one by one:
where the host needs longer for the launches than the device for the kernels, the device waits. Replicas that drift add
the time of their meetings (`autopar/cost/gradient_sync.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from autopar.cost.compute.rates import peak_of
from autopar.cost.costs import CommunicationCosts, ComputeCosts, Costs
from autopar.cost.equal_stages import equal_stages
from autopar.cost.gradient_sync import late_seconds, meeting_costs
from autopar.cost.hardware.cluster import Cluster
from autopar.cost.host_copies import exposed_copies_seconds
from autopar.cost.lowered_step import LoweredStep, lower_step
from autopar.cost.memory.peak import MemoryCosts, memory
from autopar.cost.overlap import ChunkTraffic, OverlapCost
from autopar.cost.pipeline import PartTimes, pipelined
from autopar.cost.profile import Profile, profile, profile_parts
from autopar.cost.tasks import Task
from autopar.cost.unequal_devices import KindCosts, RankKind, devices_of, rank_kinds, replica_clusters
from autopar.errors import AutoparError
from autopar.ir.graph import NamedGraph
from autopar.sharding.assignment import StepPlan


def evaluate(graph: NamedGraph, plan: StepPlan, cluster: Cluster) -> Costs:
    """Return the time and memory of one step of a plan on a cluster.

    Needs no process group and no device.

    Parameters:
        graph: the graph that the plan was made for, `Plan.graph`.
        plan: the assignment of a step and its training options, `Plan.decided`.
        cluster: devices and links, from `load_cluster`.

    Returns:
        Seconds and bytes of the busiest rank; the same arguments give the same numbers.

    `Plan.costs` has the costs on the cluster that the plan was made for; `timeline` shows the events of the same step.

    >>> import autopar, torch
    >>> model, inputs = torch.nn.Linear(64, 64, device="meta"), (torch.empty(32, 64, device="meta"),)
    >>> plan = autopar.plan(model, "dp=2", inputs, layout="ddp", cluster="h100", cache=False)
    >>> costs = autopar.evaluate(plan.graph, plan.decided, autopar.load_cluster("h100"))
    >>> costs == plan.costs
    True
    >>> older = autopar.evaluate(plan.graph, plan.decided, autopar.load_cluster("v100"))
    >>> older.step_seconds > costs.step_seconds
    True
    """
    if plan.graph != graph.fingerprint:
        raise AutoparError(
            f"the plan is for another graph than this one ({plan.graph}, not {graph.fingerprint})\n"
            "fix: trace the model with the inputs that the plan was made for, or plan again"
        )
    # A search looks at the shards of one kind of ranks; each stage takes the memory of the longest ones.
    costs, behind = _of_replicas(lower_step(graph, plan.seen({})), cluster)
    step = costs.step_seconds
    if plan.drift is not None:
        meetings = meeting_costs(graph, plan, plan.drift, cluster, step, behind)
        total, late = step + meetings.seconds, meetings.late_seconds
        kept = costs.memory.with_meetings(meetings.memory_bytes, meetings.temporary_bytes)
        costs = replace(costs, memory=kept, meetings=meetings)
    elif cluster.jitter is not None:
        late = late_seconds(cluster.jitter, plan.mesh.size)
        total = step + late
    else:
        return costs
    return replace(costs, step_seconds=total, late_seconds=late, mfu=costs.mfu * step / total if total else 0.0)


def least_seconds(graph: NamedGraph, plan: StepPlan, cluster: Cluster) -> float:
    """Return the least that a step of a plan takes, zero where it is not known without its memory.

    It is the step time, without meetings and waiting for late ranks.
    """
    if plan.assignment.pipelining is not None or plan.drift is not None:
        return 0.0
    lowered = lower_step(graph, plan)
    kinds = rank_kinds(cluster, plan.mesh, plan.options.links)
    return max(_timed(seen_by(lowered, kind), kind.alone(cluster))[1].seconds for kind in kinds)


def _of_replicas(lowered: LoweredStep, cluster: Cluster) -> tuple[Costs, float]:
    """Return the costs of the replica with most rows, and how much longer than this one the slowest replica takes.

    The graph is that of the replica with most rows; the times and saved tensors of the others are in proportion.
    """
    drift = lowered.plan.drift
    if drift is None:
        return _of_replica(lowered, cluster), 0.0
    every = [(rows, _of_replica(lowered, one)) for one, rows in replica_clusters(cluster, drift)]
    own = max((costs for rows, costs in every if rows == 1.0), key=lambda costs: costs.step_seconds)
    slowest = max(rows * costs.step_seconds for rows, costs in every)
    scaled = [replace(costs, memory=costs.memory.with_rows(rows)) for rows, costs in every]
    fullest = max(scaled, key=lambda costs: costs.limited_bytes)
    own = replace(own, memory=fullest.memory, memory_fraction=fullest.memory_fraction)
    return own, max(0.0, slowest - own.step_seconds)


def _of_replica(lowered: LoweredStep, cluster: Cluster) -> Costs:
    """Return the costs of a step without meetings and waiting for late ranks."""
    plan = lowered.plan
    if plan.assignment.pipelining is not None:
        return _of_pipeline(lowered, cluster)
    kinds = rank_kinds(cluster, plan.mesh, plan.options.links)
    every = [(kind, _of_kind(lowered, kind, cluster)) for kind in kinds]
    slowest = max((costs for _, costs in every), key=lambda costs: costs.step_seconds)
    fullest = max((costs for _, costs in every), key=lambda costs: costs.limited_bytes)
    if len(every) == 1:
        return slowest
    found = tuple(
        KindCosts(kind, costs.step_seconds, costs.compute.seconds, costs.memory.peak_bytes) for kind, costs in every
    )
    return replace(slowest, memory=fullest.memory, memory_fraction=fullest.memory_fraction, kinds=found)


def on_slowest(lowered: LoweredStep, cluster: Cluster) -> tuple[LoweredStep, Cluster]:
    """Return a step as the slowest ranks run it, with the cluster of their devices."""
    kinds = rank_kinds(cluster, lowered.plan.mesh, lowered.plan.options.links)
    slowest = kinds[0]
    if len(kinds) > 1:
        slowest = max(kinds, key=lambda kind: _of_kind(lowered, kind, cluster).step_seconds)
    return seen_by(lowered, slowest), slowest.alone(cluster)


def _of_kind(lowered: LoweredStep, kind: RankKind, cluster: Cluster) -> Costs:
    """Return the costs of a step on the ranks of one kind."""
    step = seen_by(lowered, kind)
    found, sums = _timed(step, kind.alone(cluster))
    flops = found.model_flops
    return _costs(lowered, cluster, (found,), sums, sums.seconds, memory(step), kind.memory_fraction, flops)


def _timed(step: LoweredStep, cluster: Cluster) -> tuple[Profile, _StepSums]:
    """Return the tasks and times of a step on ranks of one kind, which are all of the cluster."""
    found = profile(step, cluster)
    return found, _sums((found,), step, cluster)


def _of_pipeline(lowered: LoweredStep, cluster: Cluster) -> Costs:
    firsts = equal_stages(lowered)
    parts = priced_parts(lowered, cluster, firsts)
    step, stages = pipelined(lowered, cluster, [part.times for part in parts], firsts)
    busiest = max(stages, key=lambda stage: stage.busy_seconds + stage.exposed_seconds)
    found = tuple(parts[part].profile for part in busiest.parts)
    own = parts[busiest.parts[0]].cluster
    sums = _sums(found, lowered, own, busiest.exposed_seconds)
    if own.device.core_fraction < 1.0:
        sums = sums.faster(lowered.plan.options.micro_batches * busiest.pass_seconds, busiest.busy_seconds)
    fractions = [min(parts[part].memory_fraction for part in stage.parts) for stage in stages]
    fullest = max(range(len(stages)), key=lambda i: stages[i].memory.peak_bytes / fractions[i])
    flops = parts[0].profile.model_flops
    costs = _costs(lowered, cluster, found, sums, step, stages[fullest].memory, fractions[fullest], flops)
    return replace(costs, bubble_seconds=step - sums.seconds, stages=stages)


def _costs(
    lowered: LoweredStep,
    cluster: Cluster,
    found: tuple[Profile, ...],
    sums: _StepSums,
    step: float,
    memory_costs: MemoryCosts,
    memory_fraction: float,
    model_flops: float,
) -> Costs:
    count = lowered.plan.options.micro_batches
    flops = count * model_flops
    dtype = dtype_of_most(lowered.graph)
    every = devices_of(cluster, lowered.plan.mesh, lowered.plan.options.links)
    ranks, devices = Counter(part for part, _ in every), dict(every)
    peak = sum(number * peak_of(devices[part], dtype) for part, number in ranks.items())
    return Costs(
        step,
        sums.compute,
        _communication(found, count),
        sums.exposed_seconds,
        memory_costs,
        flops,
        count * sum(task.flops for one in found for task in one),
        flops / (step * peak) if step else 0.0,
        sums.waiting_seconds,
        sums.copies_seconds,
        host_limit_bytes=cluster.device.host_memory_bytes or math.inf,
        memory_fraction=memory_fraction,
    )


def dtype_of_most(graph: NamedGraph) -> torch.dtype:
    """Return the dtype of most parameters, whose peak the FLOPs of a step are compared with."""
    dtypes = Counter(tensor.dtype for tensor in graph.parameters)
    return max(dtypes, key=dtypes.__getitem__, default=torch.float32)


class PricedPart(NamedTuple):
    """One part of a pipeline on the slowest ranks of its stage."""

    profile: Profile
    times: PartTimes
    # As the ranks of the stage see it.
    cluster: Cluster
    # The least of the stage.
    memory_fraction: float


def priced_parts(lowered: LoweredStep, cluster: Cluster, firsts: Sequence[int]) -> list[PricedPart]:
    """Return the parts of a pipeline, each on the devices of its stage.

    `firsts` has the first stage that is equal to each: their tasks have its names.
    """
    pipelining = lowered.plan.assignment.pipelining
    assert pipelining is not None, "a pipeline has parts"
    stages, every = pipelining.stages, range(pipelining.stages * pipelining.chunks)
    equal = [part // stages * stages + firsts[part % stages] for part in every]
    known: dict[tuple[str, tuple[tuple[str, int], ...]], dict[int, Profile]] = {}
    found: list[PricedPart] = []
    for part in every:
        stage = {pipelining.axis: part % stages}
        kinds = rank_kinds(cluster, lowered.plan.mesh, lowered.plan.options.links, stage)
        ways = []
        for kind in kinds:
            step, own = seen_by(lowered, kind), kind.alone(cluster)
            key = kind.part, tuple(step.plan.axes.seen_from.items())
            if key not in known:
                priced = list(dict.fromkeys(equal))
                known[key] = dict(zip(priced, profile_parts(step, own, priced), strict=True))
            one = known[key][equal[part]]
            ways.append(PricedPart(one, part_times(one, step, own), own, kind.memory_fraction))
        slowest = max(ways, key=lambda way: way.times.forward + way.times.backward)
        found.append(slowest._replace(memory_fraction=min(way.memory_fraction for way in ways)))
    return found


def seen_by(lowered: LoweredStep, kind: RankKind) -> LoweredStep:
    """Return a step as the ranks of one kind run it: with their share of the samples."""
    plan = lowered.plan
    return lowered if plan.axes.shares is None else replace(lowered, plan=plan.seen(kind.coordinate))


@dataclass(frozen=True)
class _StepSums:
    """Times of one device in a step."""

    compute: ComputeCosts
    values_seconds: float
    exposed_seconds: float
    waiting_seconds: float
    copies_seconds: float

    @property
    def seconds(self) -> float:
        sent = self.values_seconds + self.exposed_seconds
        return self.compute.seconds + sent + self.waiting_seconds + self.copies_seconds

    def faster(self, alike_seconds: float, busy_seconds: float) -> _StepSums:
        """Return the times of a stage with cores of others; without them its forwards and backwards take alike."""
        share, compute = busy_seconds / alike_seconds, self.compute
        return _StepSums(
            ComputeCosts(
                share * compute.forward_seconds,
                share * compute.backward_seconds,
                share * compute.recompute_seconds,
                compute.optimizer_seconds,
            ),
            share * self.values_seconds,
            self.exposed_seconds,
            share * self.waiting_seconds,
            share * self.copies_seconds,
        )


def _sums(
    every: Sequence[Profile], lowered: LoweredStep, cluster: Cluster, once_seconds: float | None = None
) -> _StepSums:
    """Return the times of a device that runs some parts of the model, or all of it.

    `once_seconds`: of a stage of a pipeline, the exposed communication that happens once per step.
    """
    count = lowered.plan.options.micro_batches
    forward = [task for one in every for task in one.forward]
    backward = [task for one in every for task in one.backward]
    again = (task for task in backward if task.direction == "recompute" and not task.overlapped)
    values = (task for task in (*forward, *backward) if task.sends and not task.overlapped)
    return _StepSums(
        ComputeCosts(
            _compute_seconds(forward, "forward", count),
            _compute_seconds(backward, "backward", count),
            count * sum(task.seconds for task in again),
            sum(task.seconds for one in every for task in one.optimizer),
        ),
        count * sum(task.seconds for task in values if task.direction != "recompute"),
        sum(exposed_seconds(one, lowered, cluster, once_seconds is None) for one in every) + (once_seconds or 0.0),
        sum(waiting_seconds(one, count, once_seconds is None) for one in every),
        count * sum(sum(exposed_copies_seconds(one.copies)) for one in every),
    )


def part_times(found: Profile, lowered: LoweredStep, cluster: Cluster) -> PartTimes:
    """Return the times of one part of a pipeline."""
    overlap, each, once, rooms = OverlapCost.of(cluster), [], [], []
    for tasks, copied in zip((found.forward, found.backward), exposed_copies_seconds(found.copies), strict=True):
        alone = copied + sum(task.seconds for task in tasks if not task.overlapped and not task.once)
        room = sum(task.seconds for task in tasks if task.kind == "compute" and not task.once)
        beside = sum(task.seconds for task in tasks if task.overlapped and not task.once)
        each.append(alone + overlap.seconds(beside, room))
        once.append(sum(task.seconds for task in tasks if task.once))
        rooms.append(max(0.0, overlap.overlap_fraction * room - beside))
    # The host launches the kernels of both directions one by one.
    share = 1.0 + waiting_seconds(found, 1, with_once=False) / (sum(each) or 1.0)
    late = sum(task.seconds for task in found.backward if task.is_late)
    optimizer = sum(task.seconds for task in found.optimizer)
    is_early = lowered.reduces_early
    last = sum(task.seconds for task in found.backward if task.once and (task.is_tied or not task.overlapped))
    last = last if is_early else once[1]
    late_room = min(rooms[1], overlap.overlap_fraction * late)
    traffic = ChunkTraffic(once[0], once[1] - last, rooms[0], rooms[1], late_room)
    return PartTimes(share * each[0], share * each[1], share * late, traffic, last, optimizer)


def exposed_seconds(found: Profile, lowered: LoweredStep, cluster: Cluster, with_once: bool = True) -> float:
    """Return the exposed communication of parameters in a step, with that once per step or without."""
    total, overlap = 0.0, OverlapCost.of(cluster)
    micro_batches = lowered.plan.options.micro_batches
    for tasks in (found.forward, found.backward):
        room = sum(task.seconds for task in tasks if task.kind == "compute" and not task.once)
        each = sum(task.seconds for task in tasks if task.overlapped and not task.once)
        once = sum(task.seconds for task in tasks if task.overlapped and task.once)
        if not with_once:
            total += micro_batches * overlap.seconds(each, room)
            continue
        # Communication of the whole step overlaps with the compute of one micro-batch only.
        total += (micro_batches - 1) * overlap.seconds(each, room)
        if lowered.call is not None and tasks is found.backward and not lowered.reduces_early:
            total += overlap.seconds(each, room) + once
        else:
            total += overlap.seconds(each + once, room)
    return total


def waiting_seconds(found: Profile, micro_batches: int, with_once: bool) -> float:
    """Return how long the device waits for kernel launches in a step; what runs once is launched beside one batch."""
    tasks = (*found.forward, *found.backward)
    each = 2 * sum(one.host_seconds for one in found.copies) + sum(_ahead(task) for task in tasks if not task.once)
    once = sum(_ahead(task) for task in tasks if task.once and with_once)
    return (micro_batches - 1) * max(0.0, each) + max(0.0, each + once)


def _ahead(task: Task) -> float:
    """Return the time to launch a task less the time that it keeps the device."""
    return task.host_seconds - (0.0 if task.overlapped else task.seconds)


def _compute_seconds(tasks: Iterable[Task], direction: str, micro_batches: int) -> float:
    """Return the seconds of compute in a step, and of the local copies of reshards."""
    own = (task for task in tasks if task.direction == direction and not task.overlapped and not task.sends)
    return sum(task.seconds * (1 if task.once else micro_batches) for task in own)


def _communication(every: Sequence[Profile], micro_batches: int) -> tuple[CommunicationCosts, ...]:
    totals: dict[tuple[str, tuple[str, ...], str, str], tuple[int, float, float]] = {}
    for task in (task for found in every for task in found):
        if task.sends:
            times = 1 if task.once else micro_batches
            is_parameter = task.overlapped and not task.of_halves
            key = task.kind, task.axes, str(task.direction), "parameters" if is_parameter else "values"
            count, size, seconds = totals.get(key, (0, 0.0, 0.0))
            totals[key] = (
                count + times * (2 if task.of_halves else 1),
                size + times * task.bytes,
                seconds + times * task.seconds,
            )
    return tuple(CommunicationCosts(*key, *total) for key, total in totals.items())
