"""Time of the steps of reshards on one mesh: of values, and of buckets of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autopar.cost.compute.byte_time import seconds_of_bytes
from autopar.cost.network import Network
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

    def value_steps(
        self, steps: Sequence[StepSize], itemsize: float, share: float = 1.0, parts: int = 1
    ) -> list[StepCost]:
        """Return the cost of each step of a value's reshard.

        `share` is the value's part of an all-reduce that adds up several small tensors. The value is sent in `parts`.
        """
        if parts > 1:
            smaller = [step._replace(numel=step.numel / parts, larger=step.larger / parts) for step in steps]
            return [
                StepCost(step, parts * one.bytes, parts * one.seconds, parts * one.host_seconds)
                for step, one in zip(steps, self.value_steps(smaller, itemsize, share), strict=True)
            ]
        found = []
        for step in steps:
            if step.local:
                # A copy reads and writes the larger of both shards.
                moved = 2.0 * itemsize * step.larger
                seconds = seconds_of_bytes(moved, self.network.cluster.device)
                found.append(StepCost(step, moved, seconds, self.launch_seconds if moved else 0.0))
            else:
                size = step.numel * itemsize
                # Only a reshard that is one all-reduce, and nothing else, can be joined with others.
                part = share if len(steps) == 1 and step.kind == StepKind.ALL_REDUCE.value else 1.0
                host = self._host(step, size)
                seconds = self.network.seconds(step.kind, step.axes, size)
                found.append(StepCost(step, size, part * seconds, part * host))
        return found

    def bucket_step(self, step: StepSize, size: float) -> StepCost:
        """Return the cost of one step of all parameters in a bucket, `size` bytes together, beside the compute."""
        if step.local:
            # A slice of a parameter or of its gradient is a view, or part of the copy into the bucket.
            return StepCost(step, size, 0.0, self.launch_seconds)
        return StepCost(step, size, self.network.seconds(step.kind, step.axes, size), self._host(step, size))

    def _host(self, step: StepSize, size: float) -> float:
        """Return the host seconds of a collective; an all-reduce by level launches several."""
        by_level = self.network.by_level(step.axes, size) if step.kind == StepKind.ALL_REDUCE.value else None
        kinds = [step.kind] if by_level is None else [phase.kind for phase in by_level.phases(self.network.axes)]
        launches = self.network.cluster.library.host_seconds
        return sum(launches.get(kind, self.launch_seconds) for kind in kinds)
