"""Base of all ways to meet: when a meeting is due, and its state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.sync.replica_group import ReplicaGroup
from autopar.runtime.sync.shard_vector import ShardVector
from autopar.sharding.layout.drift import DriftStatement

__all__ = ["Meeting"]


class Meeting:
    """One way in which replicas meet; subclasses send something."""

    def __init__(self, statement: DriftStatement, vector: ShardVector, group: ReplicaGroup) -> None:
        self.statement, self.vector, self.group = statement, vector, group
        # Rows of the batch that this replica has trained on, of all replicas; known after a meeting.
        self.weight = 1 / group.count
        # Bytes that this rank has sent at meetings.
        self.sent_bytes = 0.0

    @property
    def has_equal_replicas(self) -> bool:
        """Return whether all replicas have the same parameters right after a meeting."""
        return self.statement.meeting == "mean" and self.statement.parts == 1 and self.statement.late == 0

    def common(self) -> Tensor | None:
        """Return the vector that all replicas must have at the start; None if each may have its own."""
        return None

    def begin(self) -> None:
        """Prepare before the first step; all replicas call this together."""

    def before_step(self, rows: float) -> None:
        """Meet about gradients, computed from so many rows of the batch."""

    def after_step(self, step: int, rows: float) -> None:
        """Meet after a step, if a meeting is due."""
        raise NotImplementedError

    def finish(self) -> None:
        """Complete what is under way."""

    def state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return what all replicas have in common, and what is this replica's own, for a checkpoint."""
        return {}, {}

    def load(self, common: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """Set what `state` returns. The inverse of it."""

    def loaded(self) -> None:
        """Go on from the parameters of this replica, which were set after the rest."""


def number(value: float) -> Tensor:
    """Return a number as a checkpoint stores it."""
    return torch.tensor(value, dtype=torch.float64)
