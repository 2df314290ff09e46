"""Price of replicas that drift: bytes, time of meetings, waiting for late replicas, memory.

    step = step of a replica + waiting + sent

P are the bytes of the parameters of a rank in the dtype in which they are added up, n the replicas, H the steps between
meetings, F the parts, T the steps that a meeting may take (`late`):

    mean every H   sent max(0, allreduce(P / F) - T step) F / H       2 (n-1)/n P / H bytes of a rank and step
    every 0        sent allreduce(P), before the step                 2 (n-1)/n P
    ring           sent two times P over a link                       2 P / H
    exponential    sent P over a link; `stale any`: beside the step   P / H
    server(k)      sent 2 P max(1, n / k) over a link                 P / H pushed, and as much pulled
    stale          and a broadcast to the ranks of a replica that have the same shard

Codes take 1/2 (bfloat16) or 65/256 (int8) of the bytes; `topk` gathers the values and places of all replicas. Waiting
is simulated: replica i ends step k at t_i(k) = max over the replicas that it waits for + a drawn time. Meetings change
what is learned, so these prices say nothing about how many steps a training takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from autopar.cost.hardware.cluster import Cluster, Jitter
from autopar.cost.network import Network
from autopar.cost.unequal_devices import with_slowest_links
from autopar.ir.graph import NamedGraph
from autopar.sharding.assignment import StepPlan
from autopar.sharding.layout.drift import Coder, DriftStatement
from autopar.sharding.replicas import Drift
from autopar.sharding.sharding import atoms_of

__all__ = ["MeetingCosts", "late_seconds", "meeting_costs"]

# Steps of the simulation; a replica that meets rarely needs some meetings.
STEPS = 600
MOST_STEPS = 3000
# Bytes of a message of parameters that meet without an anchor.
BUCKET_BYTES = 2**26


@dataclass(frozen=True)
class MeetingCosts:
    """Costs of meetings, for one step of a rank."""

    # Bytes that a rank sends.
    sent_bytes: float
    # Time of messages that no training overlaps.
    sent_seconds: float
    # Time by which a step is later than usual: of this replica, and of others that it waits for.
    late_seconds: float
    # Anchor, momentum, what codes lost, and slices of a server.
    memory_bytes: float
    # More while a meeting runs.
    temporary_bytes: float

    @property
    def seconds(self) -> float:
        return self.sent_seconds + self.late_seconds


def meeting_costs(
    graph: NamedGraph, plan: StepPlan, drift: Drift, cluster: Cluster, replica_seconds: float, behind_seconds: float
) -> MeetingCosts:
    """Return the costs of the meetings of replicas whose own step takes so long.

    `behind_seconds` is by how much longer the slowest replica takes; in the long run all wait for it, or nobody does.
    """
    statement, size = drift.statement, _parameter_bytes(graph, plan)
    mesh, links = drift.mesh.whole, drift.mesh.links
    network = Network(with_slowest_links(cluster, mesh, links), mesh, links)
    sent, seconds = _sent(statement, network, drift, size, replica_seconds)
    if statement.stale != 0:
        copied = _copied_bytes(graph, plan)
        sent += sum(copied.values()) / max(1, statement.every)
        waits = sum(network.seconds("broadcast", (axis,), each) for axis, each in copied.items())
        seconds += waits / max(1, statement.every)
    late = 0.0 if cluster.jitter is None else late_seconds(cluster.jitter, plan.mesh.size, drift, replica_seconds)
    late += 0.0 if statement.stale is None else behind_seconds
    return MeetingCosts(sent, seconds, late, *_memory(statement, drift.replicas, size))


def _parameter_bytes(graph: NamedGraph, plan: StepPlan) -> float:
    """Return the bytes of the trained parameters of the rank with most, as meetings add them up."""
    return _on_fullest_stage(plan, _stored_bytes(graph, plan))


def _stored_bytes(graph: NamedGraph, plan: StepPlan) -> dict[str, float]:
    """Return the bytes of the largest shard of each trained parameter."""
    trained = [tensor for tensor in graph.parameters if tensor.requires_grad]
    dtypes = {tensor.stored_dtype(plan.options.precision) for tensor in trained}
    itemsize = 8 if torch.float64 in dtypes else 4
    found = {}
    for tensor in trained:
        atoms = atoms_of(tensor)
        shape = atoms.fold(plan.assignment.stored[tensor.name].largest_sizes(atoms, plan.axes))
        found[tensor.name] = float(itemsize * prod(shape))
    return found


def _on_fullest_stage(plan: StepPlan, sizes: Mapping[str, float]) -> float:
    """Return the sum of the bytes of some parameters, on the stage that has most."""
    pipelining = plan.assignment.pipelining
    stages: dict[int | None, float] = {}
    for name, size in sizes.items():
        stage = None if pipelining is None else pipelining.held[name]
        stages[stage] = stages.get(stage, 0.0) + size
    everywhere = stages.pop(None, 0.0)
    return everywhere + max(stages.values(), default=0.0)


def _copied_bytes(graph: NamedGraph, plan: StepPlan) -> dict[str, float]:
    """Return by axis of a replica the bytes of parameters that its ranks have copies of."""
    stored, found = _stored_bytes(graph, plan), {}
    for axis, ranks in plan.axes.items():
        copied = {
            name: size
            for name, size in stored.items()
            if not any(axis in axes for axes in plan.assignment.stored[name].splits)
        }
        if ranks > 1 and copied:
            found[axis] = _on_fullest_stage(plan, copied)
    return found


# -- messages ----------------------------------------------------------------------------------------------------------


def _sent(
    statement: DriftStatement, network: Network, drift: Drift, size: float, replica_seconds: float
) -> tuple[float, float]:
    """Return the bytes that a rank sends in a step, and the time of it that nothing overlaps."""
    axes, count, every = drift.axes, drift.replicas, max(1, statement.every)
    if count == 1:
        return 0.0, 0.0
    if statement.meeting == "mean":
        sent, seconds = _mean(statement.coder, network, axes, count, size / statement.parts)
        exposed = max(0.0, seconds - statement.late * replica_seconds)
        return sent * statement.parts / every, exposed * statement.parts / every
    link = network.seconds("send", axes, size)
    if statement.meeting == "ring":
        return 2 * size / every, 2 * link / every
    if statement.meeting == "exponential":
        # Without waiting, a message is under way while the replica trains.
        beside = every * replica_seconds if statement.stale is None else 0.0
        return size / every, max(0.0, link - beside) / every
    pushed = size * (1.0 if statement.coder is None else coded_share(statement.coder))
    crowd = max(1.0, count / statement.servers)
    both = network.seconds("send", axes, pushed * crowd) + network.seconds("send", axes, size * crowd)
    pulled = size * count / statement.servers
    return (pushed + pulled) / every, both / every


def _mean(coder: Coder | None, network: Network, axes: tuple[str, ...], count: int, size: float) -> tuple[float, float]:
    """Return the bytes that a rank sends for one mean of so many bytes, and the time."""
    if coder is None:
        return 2 * (count - 1) / count * size, network.seconds("all_reduce", axes, size)
    coded = size * coded_share(coder)
    if coder.kind == "topk":
        return (count - 1) * coded, network.seconds("all_gather", axes, count * coded)
    seconds = network.seconds("all_to_all", axes, coded) + network.seconds("all_gather", axes, coded)
    return 2 * (count - 1) / count * coded, seconds


def coded_share(coder: Coder) -> float:
    """Return the bytes of a coded vector ÷ those of float32."""
    if coder.kind == "topk":
        return 2 * coder.percent / 100  # each value with its place
    return 1 / 2 if coder.kind == "bfloat16" else 65 / 256  # a scale for 256 values


# -- memory ------------------------------------------------------------------------------------------------------------


def _memory(statement: DriftStatement, count: int, size: float) -> tuple[float, float]:
    """Return the bytes that meetings keep on a rank, and those of one meeting."""
    part = size / statement.parts
    kept = 0.0
    if statement.has_anchor:
        kept += size
    if statement.meeting == "mean" and statement.outer.momentum:
        kept += size
    if statement.meeting == "server":
        kept += size / statement.servers * (2 if statement.outer.momentum else 1)
    if statement.coder is not None:
        # Two messages lose something, the second one of a slice.
        kept += size * (1 if statement.coder.kind == "topk" or statement.meeting == "server" else 1 + 1 / count)
    if statement.late:
        kept += part
    if statement.meeting == "exponential" and statement.stale is None:
        kept += 2 * size  # the weighted sum, and what the optimizer began with
    if statement.meeting == "server" or statement.stale is None or statement.has_anchor or statement.coder is not None:
        return kept, 2 * part
    return kept, (3 if statement.meeting == "ring" else 2) * min(part, BUCKET_BYTES)


# -- waiting -----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def late_seconds(jitter: Jitter, ranks: int, drift: Drift | None = None, step_seconds: float = 0.0) -> float:
    """Return how much longer than without jitter a step takes on average, by a simulation with fixed draws.

    Parameters:
        jitter: how late one rank is.
        ranks: ranks of a replica, which wait for each other in each step; without drift all ranks.
        drift: the replicas, and for whom they wait at meetings.
        step_seconds: time of a step of a replica without jitter; a replica that may be some steps behind catches up.
    """
    # The mean of the latest of all ranks, exactly but for the number of quantiles.
    alone = float(_quantiles(jitter, (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000, ranks).mean())
    if drift is None or drift.replicas == 1:
        return alone
    statement, replicas = drift.statement, drift.replicas
    every = max(1, statement.every)
    # Waiting falls with the root of the steps between meetings, so that rare ones need no longer simulation.
    shorter = min(every, MOST_STEPS // 6)
    steps = max(STEPS, 6 * shorter)
    draw = torch.Generator().manual_seed(0)
    times = [torch.zeros(replicas, dtype=torch.float64)]
    for step in range(1, steps + 1):
        own = _quantiles(jitter, torch.rand(replicas, dtype=torch.float64, generator=draw), ranks)
        times.append(_ready(statement, times, step, shorter) + step_seconds + own)
    found = float(times[-1].mean()) / steps - step_seconds
    scale: float = (shorter / every) ** 0.5
    return alone + (found - alone) * scale


def _ready(statement: DriftStatement, times: list[Tensor], step: int, every: int) -> Tensor:
    """Return when each replica begins a step, as the ends of earlier steps allow."""
    own, before = times[-1], step - 1
    if statement.meeting == "mean":
        # Parts meet one after the other, and each needs what all have sent `late` steps before.
        due = [(before - statement.late - part * every // statement.parts) % every for part in range(statement.parts)]
        if before <= statement.late or 0 not in due:
            return own
        return torch.maximum(own, times[before - statement.late].max())
    if before % every or not before:
        return own
    if statement.meeting == "ring":
        return torch.maximum(own, torch.maximum(own.roll(1), own.roll(-1)))
    if statement.stale is None:
        return own
    if statement.meeting == "exponential":
        distance = 2 ** ((before // every - 1) % max(1, (len(own) - 1).bit_length()))
        return torch.maximum(own, own.roll(distance))
    earlier = before - statement.stale * every
    return torch.maximum(own, times[earlier].max()) if earlier >= 0 else own


def _quantiles(jitter: Jitter, shares: Tensor, ranks: int) -> Tensor:
    """Return the delays that these shares of the steps stay below, of the latest of some ranks."""
    each = shares ** (1 / ranks)
    late: Tensor = (each > 1 - jitter.share_fraction) * jitter.by_seconds
    if not jitter.deviation_seconds:
        return late
    # Both are drawn from one number: a step that is late for two reasons is as rare as one for each.
    deviations: Tensor = torch.special.ndtri(each.clamp(1e-9, 1 - 1e-9))
    return late + jitter.deviation_seconds * deviations
