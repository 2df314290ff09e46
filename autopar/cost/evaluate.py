"""Price of a plan: `evaluate(graph, plan, cluster)` returns time and memory of one step.

    step = compute + communication of values + exposed communication of parameters + waiting
    exposed = max(0, gathers - η forward compute) + max(0, reductions - η backward compute) + κ overlapped

An op waits for the values that are sent to it. Parameters are gathered ahead of their use and their gradients are
reduced in parallel with the backward. This overlap is limited by η, the share of the compute time that the library can
use (`overlap_fraction`). Overlapped communication slows the compute by κ, the share of the processors that it occupies.
Communication that happens once per step (a gathered copy that stays, a reduction in the last micro-batch) overlaps with
one micro-batch; communication in every micro-batch overlaps with all. An eager program launches its kernels one by one:
where the host needs longer for the launches than the device for the kernels, the device waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

from autopar.cost.compute.rates import peak_of
from autopar.cost.hardware.cluster import Cluster
from autopar.cost.lowered_step import LoweredStep
from autopar.cost.memory.peak import MemoryCosts, memory
from autopar.cost.profile import Profile, Task, profile
from autopar.errors import AutoparError
from autopar.ir.graph import NamedGraph
from autopar.sharding.assignment import StepPlan


@dataclass(frozen=True)
class ComputeCosts:
    """Compute seconds of a step, on the busiest rank."""

    forward_seconds: float
    backward_seconds: float
    # Includes the communication that is repeated for the recompute.
    recompute_seconds: float
    optimizer_seconds: float

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds + self.recompute_seconds + self.optimizer_seconds


@dataclass(frozen=True)
class CommunicationCosts:
    """All collectives of a step of one kind, over the same axes, in one direction."""

    kind: str
    axes: tuple[str, ...]
    direction: str
    # `values`, which ops wait for, or `parameters`, which overlap with the compute.
    of: str
    count: int
    bytes: float
    seconds: float

    def __str__(self) -> str:
        over = "*".join(self.axes)
        return f"{self.count} {self.kind}({over}) of {self.of}, {self.direction}: {self.seconds * 1e3:.2f} ms"


@dataclass(frozen=True)
class Costs:
    """Time and memory of one step of a plan: all micro-batches and the optimizer."""

    step_seconds: float
    compute: ComputeCosts
    communication: tuple[CommunicationCosts, ...]
    # Communication of parameters that does not overlap with the compute, and the compute that it slows.
    exposed_seconds: float
    memory: MemoryCosts
    # FLOPs of the whole model on all devices, without recomputed ops.
    flops: float
    # FLOPs of the busiest device, with recomputed ops.
    device_flops: float
    # `flops` per second over the peak of all devices.
    mfu: float
    # Time that devices wait for their host to launch kernels.
    waiting_seconds: float = 0.0

    @property
    def communication_seconds(self) -> float:
        """Return the time of all collectives, exposed or overlapped."""
        return sum(one.seconds for one in self.communication)

    def seconds_of(self, of: str) -> float:
        """Return the time of all collectives of `values` or of `parameters`."""
        return sum(one.seconds for one in self.communication if one.of == of)


class OverlapCost(NamedTuple):
    """Cost of communication in parallel with compute: sent - overlapped + κ overlapped, overlapped <= η compute.

    Written as κ sent + (1 - κ) max(0, sent - η compute) the formula is convex: a linear part and a hinge, which is the
    form of the solver's objective.
    """

    # η: share of the compute time that the library can use.
    overlap_fraction: float
    # κ: share of the processors that communication occupies.
    occupied: float

    @staticmethod
    def of(cluster: Cluster) -> OverlapCost:
        matrix = cluster.device.matrix
        occupied = cluster.library.processors / matrix.processors if matrix is not None else 0.0
        return OverlapCost(cluster.library.overlap_fraction, occupied)

    def seconds(self, sent_seconds: float, compute_seconds: float) -> float:
        """Return how much longer compute takes with communication beside it."""
        overlapped = min(sent_seconds, self.overlap_fraction * compute_seconds)
        return sent_seconds - overlapped + self.occupied * overlapped


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
    lowered = LoweredStep(graph, plan)
    found = profile(lowered, cluster)
    count = plan.options.micro_batches
    compute = ComputeCosts(
        count * _compute_seconds(found.forward, "forward"),
        count * _compute_seconds(found.backward, "backward"),
        count * sum(task.seconds for task in found.backward if task.direction == "recompute" and not task.overlapped),
        sum(task.seconds for task in found.optimizer),
    )
    values = count * sum(
        task.seconds
        for task in (*found.forward, *found.backward)
        if task.sends and not task.overlapped and task.direction != "recompute"
    )
    exposed = exposed_seconds(found, plan, cluster)
    waiting = count * waiting_seconds(found)
    step = compute.seconds + values + exposed + waiting
    flops = count * found.model_flops
    # The peak is that of the dtype of most parameters.
    dtypes = Counter(tensor.dtype for tensor in graph.parameters)
    peak = peak_of(cluster.device, max(dtypes, key=dtypes.__getitem__, default=torch.float32))
    return Costs(
        step,
        compute,
        _communication(found, count),
        exposed,
        memory(lowered),
        flops,
        count * sum(task.flops for task in found),
        flops / (step * prod(plan.axes.values()) * peak) if step else 0.0,
        waiting,
    )


def exposed_seconds(found: Profile, plan: StepPlan, cluster: Cluster) -> float:
    """Return the exposed communication of parameters in a step."""
    total, overlap = 0.0, OverlapCost.of(cluster)
    for tasks in (found.forward, found.backward):
        room = sum(task.seconds for task in tasks if task.kind == "compute")
        each = sum(task.seconds for task in tasks if task.overlapped and not task.once)
        once = sum(task.seconds for task in tasks if task.overlapped and task.once)
        # Communication of the whole step overlaps with the compute of one micro-batch only.
        total += (plan.options.micro_batches - 1) * overlap.seconds(each, room)
        total += overlap.seconds(each + once, room)
    return total


def waiting_seconds(found: Profile) -> float:
    """Return how long the device waits for kernel launches in one micro-batch."""
    tasks = (*found.forward, *found.backward)
    host = sum(task.host_seconds for task in tasks if not task.once)
    return max(0.0, host - sum(task.seconds for task in tasks if not task.overlapped))


def _compute_seconds(tasks: Iterable[Task], direction: str) -> float:
    """Return the seconds of compute, and of the local copies of reshards."""
    own = (task for task in tasks if task.direction == direction and not task.overlapped)
    return sum(task.seconds for task in own if not task.sends)


def _communication(found: Profile, micro_batches: int) -> tuple[CommunicationCosts, ...]:
    totals: dict[tuple[str, tuple[str, ...], str, str], tuple[int, float, float]] = {}
    for task in found:
        if task.sends:
            times = 1 if task.once else micro_batches
            key = task.kind, task.axes, str(task.direction), "parameters" if task.overlapped else "values"
            count, size, seconds = totals.get(key, (0, 0.0, 0.0))
            totals[key] = count + times, size + times * task.bytes, seconds + times * task.seconds
    return tuple(CommunicationCosts(*key, *total) for key, total in totals.items())
