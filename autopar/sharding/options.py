"""Options of a training step that no search decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

import torch


@dataclass(frozen=True)
class PlanOptions:
    """What of a plan is not searched for."""

    outputs: Outputs = "sharded"
    local_inputs: bool = False
    optimizer: str = "adamw"
    micro_batches: int = 1
    compiled: bool = False
    master_dtype: torch.dtype | None = None
    gradient_dtype: torch.dtype | None = None
    links: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


# How results are handed out: as DTensors, gathered, or as plain shards. With shards each rank makes a loss of its own.
# Gradients are those of the mean of these losses, or of their sum.
Outputs = Literal["sharded", "full", "local", "local_sum"]


# What a repeated layer computes again in the backward: nothing; what is cheap to compute; all of it.
Recompute = Literal["none", "selective", "full"]
