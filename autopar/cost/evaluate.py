"""The price of a plan, solved or written by hand: `evaluate(graph, plan, cluster)`.

    step = compute + communication of values + exposed communication of parameters + waiting
    exposed = max(0, gathers - η forward compute) + max(0, reductions - η backward compute) + κ hidden

Values are waited for where they are used. Parameters are gathered ahead of their use and their gradients reduced beside
the backward, but only as much as there is to compute beside: η is the share of it that the library of the cluster can
use (`overlap_fraction`). What is hidden slows the computing, as it takes some of the device's processors: κ is their
share. What happens once per step (a gathered copy that stays, a reduction in the last micro-batch) has the forward or
backward of one micro-batch to hide behind, what happens in every micro-batch has all of them. An eager program launches
its kernels one by one: where the host takes longer for all of them than the device does to run them, the device waits.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from autopar.cost.compute.rates import peak_of
from autopar.cost.costs import CommunicationCosts, ComputeCosts, Costs
from autopar.cost.hardware.cluster import Cluster
from autopar.cost.memory.peak import memory
from autopar.cost.step.lowered_step import LoweredStep
from autopar.cost.step.profile import Profile, Task, profile
from autopar.errors import AutoparError
from autopar.ir.graph import NamedGraph
from autopar.sharding.assignment import StepPlan

__all__ = ["beside_seconds", "evaluate"]


def evaluate(graph: NamedGraph, plan: StepPlan, cluster: Cluster) -> Costs:
    """What one step of the plan takes on the cluster, and what its devices hold."""
    if plan.graph != graph.fingerprint:
        raise AutoparError(
            f"the plan is for another graph than this one ({plan.graph}, not {graph.fingerprint})\n"
            "fix: trace the model with the inputs that the plan was made for, or plan again"
        )
    wired = LoweredStep(graph, plan)
    found = profile(wired, cluster)
    count = plan.micro_batches
    compute = ComputeCosts(
        count * _seconds(found.forward, "forward"),
        count * _seconds(found.backward, "backward"),
        count * sum(task.seconds for task in found.backward if task.direction == "recompute" and not task.beside),
        sum(task.seconds for task in found.optimizer),
    )
    values = count * sum(task.seconds for task in (*found.forward, *found.backward) if _of_values(task))
    exposed = exposed_seconds(found, plan, cluster)
    waiting = count * waiting_seconds(found)
    step = compute.seconds + values + exposed + waiting
    device_flops = count * sum(task.flops for task in found)
    flops = count * found.model_flops
    devices = 1
    for size in plan.axes.values():
        devices *= size
    peak = peak_of(cluster.device, _dtype(graph))
    return Costs(
        step,
        compute,
        _communication(found, count),
        exposed,
        memory(wired),
        flops,
        device_flops,
        flops / (step * devices * peak) if step else 0.0,
        waiting,
    )


def exposed_seconds(found: Profile, plan: StepPlan, cluster: Cluster) -> float:
    """What is sent of parameters and not hidden: once per step beside one micro-batch, else beside each."""
    total = 0.0
    for tasks in (found.forward, found.backward):
        room = sum(task.seconds for task in tasks if task.kind == "compute")
        each = sum(task.seconds for task in tasks if task.beside and not task.once)
        once = sum(task.seconds for task in tasks if task.beside and task.once)
        total += (plan.micro_batches - 1) * beside_seconds(each, room, cluster)
        total += beside_seconds(each + once, room, cluster)
    return total


def beside_seconds(sent_seconds: float, computed_seconds: float, cluster: Cluster) -> float:
    """How much longer computing takes with this communication beside it: what does not fit, what it takes away."""
    hidden = min(sent_seconds, cluster.library.overlap_fraction * computed_seconds)
    matrix = cluster.device.matrix
    taken = cluster.library.processors / matrix.processors if matrix is not None else 0.0
    return sent_seconds - hidden + taken * hidden


def waiting_seconds(found: Profile) -> float:
    """What the host takes for one micro-batch beyond what the device does."""
    tasks = (*found.forward, *found.backward)
    host = sum(task.host_seconds for task in tasks if not task.once)
    return max(0.0, host - sum(task.seconds for task in tasks if not task.beside))


def _seconds(tasks: Iterable[Task], direction: str) -> float:
    """Of computing, and of the copies that conversions make."""
    own = (task for task in tasks if task.direction == direction and not task.beside)
    return sum(task.seconds for task in own if task.kind in ("compute", "copy"))


def _of_values(task: Task) -> bool:
    return task.kind not in ("compute", "copy") and not task.beside and task.direction != "recompute"


def _communication(found: Profile, micro_batches: int) -> tuple[CommunicationCosts, ...]:
    totals: dict[tuple[str, tuple[str, ...], str, str], tuple[int, float, float]] = {}
    for task in found:
        if task.kind in ("compute", "copy"):
            continue
        times = 1 if task.once else micro_batches
        key = task.kind, task.axes, str(task.direction), "parameters" if task.beside else "values"
        count, size, seconds = totals.get(key, (0, 0.0, 0.0))
        totals[key] = count + times, size + times * task.bytes, seconds + times * task.seconds
    return tuple(CommunicationCosts(*key, *total) for key, total in totals.items())


def _dtype(graph: NamedGraph) -> torch.dtype:
    """The dtype that most parameters have."""
    counts: dict[torch.dtype, int] = {}
    for tensor in graph.parameters:
        counts[tensor.dtype] = counts.get(tensor.dtype, 0) + 1
    return max(counts, key=lambda dtype: counts[dtype], default=torch.float32)
