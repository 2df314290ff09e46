"""Options of a training step that no search decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

import torch


@dataclass(frozen=True)
class PlanOptions:
    """Options of a step that no search decides."""

    outputs: Outputs = "sharded"
    local_inputs: bool = False
    optimizer: str = "adamw"
    micro_batches: int = 1
    compiled: bool = False
    master_dtype: torch.dtype | None = None
    gradient_dtype: torch.dtype | None = None
    links: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


# Form of the results: DTensors, whole tensors, or plain shards. With shards each rank computes a loss of its own, and
# gradients are those of the mean of these losses, or of their sum.
Outputs = Literal["sharded", "full", "local", "local_sum"]


# Ops of a repeated layer that the backward recomputes: none, the cheap ones, or all.
Recompute = Literal["none", "selective", "full"]
