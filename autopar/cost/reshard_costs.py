"""Costs of reshards: each step of a value or of a bucket of parameters, and the overlap with compute.

`evaluate` and the model of the solver both take these numbers from here, so they agree on every reshard.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autopar.cost.collectives.network import Network
from autopar.cost.compute.op_time import seconds_of_bytes
from autopar.cost.hardware.cluster import Cluster
from autopar.sharding.reshard.reshard import StepKind, StepSize


class StepCost(NamedTuple):
    """Cost of one step of a reshard: bytes, seconds on the device, seconds of the host to launch it."""

    step: StepSize
    bytes: float
    seconds: float
    host_seconds: float


@dataclass(frozen=True)
class ReshardCosts:
    """Costs of reshard steps on one mesh of one cluster."""

    network: Network
    # Host seconds to launch one kernel of the program.
    launch_seconds: float

    def value_steps(self, steps: Sequence[StepSize], itemsize: int, share: float = 1.0) -> Iterator[StepCost]:
        """Yield the cost of each step of a value's reshard; ops wait for all of them.

        `share` is the value's part of an all-reduce that adds up several small tensors.
        """
        device = self.network.cluster.device
        for step in steps:
            if step.local:
                # A copy reads and writes the larger of both shards.
                moved = 2.0 * itemsize * step.larger
                yield StepCost(step, moved, seconds_of_bytes(moved, device), self.launch_seconds if moved else 0.0)
            else:
                # Only a reshard that is one all-reduce, and nothing else, can be joined with others.
                part = share if len(steps) == 1 and step.kind == StepKind.ALL_REDUCE.value else 1.0
                size = step.numel * itemsize
                seconds = self.network.seconds(step.kind, step.axes, size)
                yield StepCost(step, size, part * seconds, part * self._collective_launch(step.kind))

    def bucket_step(self, step: StepSize, size: float) -> StepCost:
        """Return the cost of one step of all parameters in a bucket, `size` bytes together, beside the compute."""
        if step.local:
            # A slice of a parameter or of its gradient is a view, or part of the copy into the bucket.
            return StepCost(step, size, 0.0, self.launch_seconds)
        seconds = self.network.seconds(step.kind, step.axes, size)
        return StepCost(step, size, seconds, self._collective_launch(step.kind))

    def _collective_launch(self, kind: str) -> float:
        return self.network.cluster.library.host_seconds.get(kind, self.launch_seconds)


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
