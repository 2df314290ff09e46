"""Range of the time of a step: where 80 % of the measured runs of its kind lay, given their predictions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.cost.compute.expected_flops import expected_flops
from autopar.cost.costs import Costs
from autopar.cost.evaluate import dtype_of_most
from autopar.cost.hardware.cluster import Cluster, cluster_names
from autopar.cost.network import RING_PASS, Network
from autopar.cost.step_errors import ANY, CPU, RunKind, StepErrors, errors_of
from autopar.ir.graph import NamedGraph
from autopar.sharding.assignment import StepPlan

__all__ = ["TimeRange", "is_within_noise", "kind_of_run", "time_range"]

# Runs of up to so many times as many devices count as measured.
MORE_DEVICES = 2
# Share of a device's memory above which allocators free blocks and request them again: the 10 published runs that are
# predicted to need so much took 1.3 to 10 times as long as predicted.
FULL_FRACTION = 0.9


@dataclass(frozen=True)
class TimeRange:
    """Range of the time of a step, and the measured runs that it is from."""

    step_seconds: float
    errors: StepErrors
    # Properties of the plan that no measured run has.
    extrapolated: tuple[str, ...]
    # True where the peak of the plan is above `FULL_FRACTION` of a device's memory.
    fills_memory: bool = False

    @property
    def low_seconds(self) -> float:
        return self.errors.low * self.step_seconds

    @property
    def high_seconds(self) -> float:
        return self.errors.high * self.step_seconds


def time_range(
    graph: NamedGraph, plan: StepPlan, cluster: Cluster, costs: Costs, known: Sequence[StepErrors]
) -> TimeRange | None:
    """Return the range of the time of a step; None on a device for which no runs say anything."""
    kind = kind_of_plan(graph, plan, cluster)
    errors = errors_of(kind, known)
    if errors is None:
        return None
    beyond = tuple(_beyond(graph, plan, cluster, costs, kind, errors))
    fills_memory = costs.limited_bytes > FULL_FRACTION * cluster.device.memory_bytes
    return TimeRange(costs.step_seconds, errors, beyond, fills_memory)


def kind_of_plan(graph: NamedGraph, plan: StepPlan, cluster: Cluster) -> RunKind:
    network = Network(cluster, plan.mesh, plan.options.links)
    bits = 8 if plan.options.precision.linears else 8 * dtype_of_most(graph).itemsize
    return kind_of_run(cluster, network, plan.assignment.pipelining is not None, bits)


def kind_of_run(cluster: Cluster, network: Network, is_pipeline: bool, bits: int) -> RunKind:
    """Return the kind of a run on the links of a network."""
    # Devices of one generation have names that begin alike: `A100 SXM4 40 GB`.
    device = CPU if cluster.device.op_seconds else cluster.device.name.split()[0]
    crossed = {span.level.name for span in network.group(tuple(network.axes))} - {cluster.level[0].name}
    return RunKind(device, "several" if crossed else "one", "several" if is_pipeline else "one", str(bits))


def _beyond(
    graph: NamedGraph, plan: StepPlan, cluster: Cluster, costs: Costs, kind: RunKind, errors: StepErrors
) -> Iterator[str]:
    """Yield what a plan has and none of the measured runs."""
    if errors.kind.device == ANY:
        yield f"is on {kind.device}"
    if kind.device == CPU and cluster.name in cluster_names():
        yield "is on a machine that was not calibrated"
    # Runs on CPUs have both kinds of stages.
    if errors.kind.stages == ANY and kind.device != CPU:
        yield "has such stages"
    if errors.kind.bits == ANY:
        yield f"multiplies in {kind.bits} bits"
    if plan.mesh.size > MORE_DEVICES * errors.devices:
        yield f"has more than {errors.devices:,} devices"
    if cluster.part:
        yield "has unequal devices"
    if any(tensor.routed for tensor in graph.tensors.values()):
        yield "has experts"
    elif expected_flops(graph) is None:
        yield "has convolutions or recurrences"
    if any(one.kind == RING_PASS for one in costs.communication):
        yield "passes keys in a ring"
    if "offload" in plan.recompute.values():
        yield "copies saved tensors to the host"
    if plan.options.offload_states:
        yield "has the states of its optimizer on the host"
    if plan.drift is not None:
        yield "has replicas that drift"


def is_within_noise(one: TimeRange, other: TimeRange) -> bool:
    """Return True if two plans may be in either order: their predictions differ by less than the usual errors do."""
    fast, slow = sorted((one.step_seconds, other.step_seconds))
    return slow < fast * max(one.errors.apart, other.errors.apart)
