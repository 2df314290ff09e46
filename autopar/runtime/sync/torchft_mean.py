"""Meetings in the mean over torchft: a replica may die and come back, and the others go on.

Each replica is a launch of its own (`torchrun`), with REPLICA_GROUP_ID for its number. The lighthouse at
TORCHFT_LIGHTHOUSE knows which replicas are there. A meeting asks for them first; a replica that has come back gets the
parameters of another one, and counts for nothing in its first mean. Where a replica dies within a meeting, the others
keep what they have, and meet at the next time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import AutoparError
from autopar.lowering.collectives.process_groups import limit_seconds_of
from autopar.runtime.sync.mean import MeanMeeting, outer_step
from autopar.runtime.sync.replica_group import ReplicaGroup
from autopar.sharding.layout.drift import DriftStatement, print_drift
from autopar.sharding.replicas import Drift

__all__ = ["TorchftMeeting", "has_lighthouse", "is_in_use", "replica_group_of"]

LIGHTHOUSE, NUMBER = "TORCHFT_LIGHTHOUSE", "REPLICA_GROUP_ID"
# A replica that has just come back has trained nothing: it has nearly no weight, and a mean of such ones is defined.
NEW_ROWS = 1e-9


class _Steps(Protocol):
    """The counter of steps, which a replica that comes back takes over."""

    steps: int


def has_lighthouse() -> bool:
    """Return whether the environment names a lighthouse of torchft."""
    return LIGHTHOUSE in os.environ


def is_in_use(drift: Drift) -> bool:
    """Return whether replicas are launches of their own, which meet over torchft."""
    return has_lighthouse() and drift.statement.meeting == "mean"


def replica_group_of(devices: DeviceMesh, drift: Drift) -> ReplicaGroup:
    """Return the place of this launch among the replicas; raise where torchft cannot run its meetings."""
    statement = drift.statement
    if not statement.every or statement.parts > 1 or statement.late or statement.coder is not None:
        raise AutoparError(
            f"torchft runs no meetings like '{print_drift(statement)}': expected 'mean' of parameters in one part, not "
            f"late and not coded\nfix: leave these words out, or unset {LIGHTHOUSE}"
        )
    number = os.environ.get(NUMBER, "")
    if not number.isdigit() or int(number) >= drift.replicas:
        raise AutoparError(
            f"invalid {NUMBER}={number!r}: expected the number of this replica, from 0 to {drift.replicas - 1}\n"
            f"fix: start each replica as a launch of its own: {NUMBER}=0 torchrun ... YOUR_SCRIPT, and so on"
        )
    return ReplicaGroup(int(number), tuple(range(drift.replicas)), None, devices.size())


class TorchftMeeting(MeanMeeting):
    """Meetings in the mean of the replicas that are there."""

    def __init__(self, statement: DriftStatement, vector: Any, group: ReplicaGroup, steps: _Steps) -> None:
        super().__init__(statement, vector, group)
        self._steps = steps
        self._manager: Any = None
        # Replicas at the latest meeting.
        self.participants = 0

    def begin(self) -> None:
        super().begin()
        if self._manager is None:
            self._manager = _manager(self.vector.device, self.group, self._state, self._recover)

    def after_step(self, step: int, rows: float) -> None:
        (part,) = self.parts
        part.rows += rows
        count = step - self.statement.warmup
        if count > 0 and count % self.statement.every:
            return
        # Here a replica that has come back gets the state of another one.
        self._manager.start_quorum()
        x = self.vector.read(0, self.vector.size)
        sent = x if self.anchor is None else self.anchor - x
        message = torch.cat([sent * part.rows, sent.new_full((1,), part.rows)])
        self._manager.allreduce(message).wait()
        if not self._manager.should_commit():
            return  # a replica died: this one goes on with what it has, and its rows count the next time
        self.participants = self._manager.num_participants()
        # torchft divides both by the number of replicas.
        total, mean = float(message[-1]) * self.participants, message[:-1] / float(message[-1])
        self.weight, part.rows = part.rows / total, 0.0
        self.sent_bytes += 2 * (self.participants - 1) / self.participants * x.numel() * x.element_size()
        if self.anchor is not None:
            if count > 0:
                outer_step(self.statement.outer, self.anchor, mean, self.momentum)
            else:
                self.anchor -= mean
            mean = self.anchor
        self.vector.write(0, self.vector.size, mean)

    def finish(self) -> None:
        if self._manager is not None:
            self._manager.shutdown()
            self._manager = None

    def _state(self) -> dict[str, Any]:
        """Return what a replica that comes back needs."""
        held = {"anchor": self.anchor, "momentum": self.momentum}
        found: dict[str, Any] = {name: value.clone() for name, value in held.items() if value is not None}
        return {**found, "parameters": self.vector.read(0, self.vector.size), "steps": self._steps.steps}

    def _recover(self, state: dict[str, Any]) -> None:
        """Take the state of another replica."""
        self.vector.write(0, self.vector.size, state["parameters"].to(self.vector.device))
        for name in ("anchor", "momentum"):
            held: Tensor | None = getattr(self, name)
            if held is not None:
                held.copy_(state[name])
        self._steps.steps = state["steps"]
        self.parts[0].rows = NEW_ROWS


def _manager(
    device: torch.device, group: ReplicaGroup, state: Callable[[], Any], recover: Callable[[Any], None]
) -> Any:
    try:
        torchft: Any = import_module("torchft")
    except ImportError as error:
        raise AutoparError(
            f"{LIGHTHOUSE} is set, and torchft cannot be imported: {error}\nfix: python -m pip install "
            f"'autopar[torchft]', or unset {LIGHTHOUSE}"
        ) from error
    world = dist.group.WORLD
    assert world is not None, "the ranks of the replica have a group"
    limit = timedelta(seconds=limit_seconds_of(world))
    kind = torchft.ProcessGroupGloo if device.type == "cpu" else torchft.ProcessGroupNCCL
    return torchft.Manager(
        pg=kind(timeout=limit),
        load_state_dict=recover,
        state_dict=state,
        min_replica_size=1,
        use_async_quorum=False,
        timeout=limit,
        quorum_timeout=limit,
        # All replicas start with the same weights.
        init_sync=False,
        replica_id=f"replica{group.index}",
    )
