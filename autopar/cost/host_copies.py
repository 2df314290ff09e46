"""Copies of saved tensors to the host and back: their time, and what of it does not run beside the compute.

The copies of a layer run beside the next offloaded layer, and in the backward beside the one after it. Repeated layers
are alike, so the compute of all offloaded layers leaves room for the copies of all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from autopar.cost.compute.op_time import OpWork
from autopar.cost.hardware.cluster import Cluster
from autopar.cost.lowered_step import LoweredStep
from autopar.cost.memory.step_memory import ForwardMemory
from autopar.errors import ClusterError
from autopar.ir.values import NamedNode

__all__ = [
    "LayerCopies",
    "copies_by_op",
    "exposed_copies_seconds",
    "exposed_state_seconds",
    "host_copy_seconds",
    "layer_copies",
]

# Who is copied to the host, and how to do without.
SAVED = ("saved tensors", "write 'recompute full' in place of 'recompute offload'")
STATES = ("states of the optimizer", "leave offload_states out")


class LayerCopies(NamedTuple):
    """Copies of the saved tensors of one offloaded layer to the host; as many come back in the backward."""

    ops: frozenset[str]
    bytes: float
    # Of one direction.
    seconds: float
    host_seconds: float
    # Compute of the layer: copies run beside that of a neighbour, which is alike.
    forward_room: float
    backward_room: float


def exposed_copies_seconds(copies: Sequence[LayerCopies]) -> tuple[float, float]:
    """Return how much longer forward and backward of a micro-batch take, as copies do not end beside the compute."""
    seconds = sum(one.seconds for one in copies)
    rooms = (sum(one.forward_room for one in copies), sum(one.backward_room for one in copies))
    return max(0.0, seconds - rooms[0]), max(0.0, seconds - rooms[1])


def exposed_state_seconds(state_bytes: float, step_bytes: float, cluster: Cluster) -> float:
    """Return how much longer the optimizer's step takes for a parameter whose states come from the host.

    Its states come and go beside the steps of other parameters, both ways at once.
    """
    return max(0.0, host_copy_seconds(state_bytes, cluster, STATES) - step_bytes / cluster.device.optimizer_stream)


def host_copy_seconds(size: float, cluster: Cluster, what: tuple[str, str] = SAVED) -> float:
    """Return the time to copy bytes to the host, or back; `what` says in errors what is copied, and the way out."""
    rate = cluster.device.host_bytes_per_second
    if rate is None:
        raise ClusterError(
            f"unknown link of a device to its host in cluster '{cluster.name}': expected 'host_link', as {what[0]} "
            "are offloaded\n"
            f"fix: add a line as 'host_link = \"50 GB/s [measured]\"' to the device {cluster.device.name}, "
            f"or {what[1]}"
        )
    return size / rate


def layer_copies(
    layers: Mapping[str, int],
    nodes: Sequence[NamedNode],
    works: Mapping[str, OpWork],
    moved: Mapping[str, tuple[int, float]],
    cluster: Cluster,
    launch_seconds: float,
) -> tuple[LayerCopies, ...]:
    """Return the copies of the layers among some ops; `moved` has the tensors that an op moves, and their bytes."""
    members: dict[int, list[str]] = {}
    for node in nodes:
        if node.name in layers:
            members.setdefault(layers[node.name], []).append(node.name)
    found = []
    for ops in members.values():
        count = sum(moved[op][0] for op in ops if op in moved)
        size = sum(moved[op][1] for op in ops if op in moved)
        seconds = host_copy_seconds(size, cluster)
        rooms = (sum(works[op].forward.seconds for op in ops), sum(works[op].backward.seconds for op in ops))
        found.append(LayerCopies(frozenset(ops), size, seconds, count * launch_seconds, *rooms))
    return tuple(found)


def copies_by_op(step: LoweredStep) -> Mapping[str, tuple[int, float]]:
    """Return the number and the bytes of the storages that each op of an offloaded layer moves."""
    pipelining, found = step.plan.assignment.pipelining, dict[str, tuple[int, float]]()
    if pipelining is None or step.stage is not None:
        each = [step]
    else:
        each = [step.at(stage) for stage in range(pipelining.stages)]
    for one in each:
        run = ForwardMemory(one)
        run.forward()
        for op, size in run.host.copies.values():
            if op in one.ops_here:
                count, total = found.get(op, (0, 0.0))
                found[op] = count + 1, total + size
    return found
