"""Costs of a plan, the result of `evaluate`: times of one step, its collectives, its memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.cost.gradient_sync import MeetingCosts
from autopar.cost.memory.peak import MemoryCosts
from autopar.cost.pipeline import PricedStage
from autopar.cost.unequal_devices import KindCosts

__all__ = ["CommunicationCosts", "ComputeCosts", "Costs"]


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
    # Copies of saved tensors to the host and back that do not run beside the compute.
    copies_seconds: float = 0.0
    # Share of the host's memory that one device has.
    host_limit_bytes: float = math.inf
    # Time that the busiest stage of a pipeline waits for others.
    bubble_seconds: float = 0.0
    # Of a pipeline; the other times are those of the busiest stage, the memory that of the fullest.
    stages: tuple[PricedStage, ...] = ()
    # Time by which steps are later than usual, where the cluster says how they vary.
    late_seconds: float = 0.0
    # Of replicas that drift; the other costs are those of one of them.
    meetings: MeetingCosts | None = None
    # Of unequal devices or shares; the other times are those of the slowest kind of ranks, the memory that of the one
    # nearest to its limit.
    kinds: tuple[KindCosts, ...] = ()
    # Memory limit of the device with this memory, as a share of the limit of the cluster's device.
    memory_fraction: float = 1.0

    @property
    def communication_seconds(self) -> float:
        """Return the time of all collectives, exposed or overlapped."""
        return sum(one.seconds for one in self.communication)

    @property
    def limited_bytes(self) -> float:
        """Return the peak to compare with the limit of the cluster's device: more than its own on a smaller device."""
        return self.memory.peak_bytes / self.memory_fraction

    @property
    def fits_host(self) -> bool:
        """Return whether the memory of the host holds what leaves the device."""
        return self.memory.host_bytes <= self.host_limit_bytes

    @property
    def waited_seconds(self) -> float:
        """Return the time that ops wait for values of other devices."""
        others = self.exposed_seconds, self.waiting_seconds, self.copies_seconds, self.bubble_seconds, self.late_seconds
        meetings = 0.0 if self.meetings is None else self.meetings.sent_seconds
        return self.step_seconds - self.compute.seconds - sum(others) - meetings

    def seconds_of(self, of: str) -> float:
        """Return the time of all collectives of `values` or of `parameters`."""
        return sum(one.seconds for one in self.communication if one.of == of)
