"""What a plan costs: the time of a step by what it is spent on, memory by what fills it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CommunicationCosts", "ComputeCosts", "Costs", "MemoryCosts"]


@dataclass(frozen=True)
class ComputeCosts:
    """Per step, on the rank that has most to do."""

    forward_seconds: float
    backward_seconds: float
    recompute_seconds: float
    """What is computed again in the backward, with what is sent again for it."""
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
    of: str
    """`values`, which ops wait for, or `parameters`, which move beside the computing."""
    count: int
    bytes: float
    seconds: float

    def __str__(self) -> str:
        over = "*".join(self.axes)
        return f"{self.count} {self.kind}({over}) of {self.of}, {self.direction}: {self.seconds * 1e3:.2f} ms"


@dataclass(frozen=True)
class MemoryCosts:
    """Bytes on the device that holds most; the kinds are what they are at the peak."""

    parameters_bytes: float
    """As they are stored, in the dtype that the optimizer updates; buffers too."""
    copies_bytes: float
    """Of parameters, for the whole step: in the dtype that is computed in, or gathered."""
    gradients_bytes: float
    """At the end of the backward."""
    optimizer_bytes: float
    inputs_bytes: float
    saved_bytes: float
    """What the forward leaves for the backward, of one micro-batch, gathered parameters and results included."""
    peak_bytes: float
    """The most at any moment of a step."""
    peak_at: str
    """When that is: `the backward of head/linear`."""


@dataclass(frozen=True)
class Costs:
    """One step of a plan: all micro-batches and the optimizer."""

    step_seconds: float
    compute: ComputeCosts
    communication: tuple[CommunicationCosts, ...]
    exposed_seconds: float
    """What is sent of parameters and not hidden behind the computing."""
    memory: MemoryCosts
    flops: float
    """Of the whole model on all devices, without what is computed again."""
    device_flops: float
    """Of the busiest device, with it."""
    mfu: float
    """Model FLOP/s over the peak of the devices."""
    waiting_seconds: float = 0.0
    """What the devices wait for their host to launch kernels."""

    @property
    def communication_seconds(self) -> float:
        """Whatever it hides behind."""
        return sum(one.seconds for one in self.communication)

    def seconds_of(self, of: str) -> float:
        """The communication of `values` or of `parameters`."""
        return sum(one.seconds for one in self.communication if one.of == of)
