"""Options of a training step that no search decides, and the dtype in which half precision adds up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

import torch

from autopar.ir.precision import OWN, Precision


@dataclass(frozen=True)
class TrainingOptions:
    """Options of a step that no search decides: how it is fed, what it returns, how it updates parameters."""

    outputs: Outputs = "sharded"
    # True: each rank passes its own shards, so that no input is split at the start of a step.
    local_inputs: bool = False
    optimizer: str = "adamw"
    # True: the states of the optimizer live in memory of the host between steps.
    offload_states: bool = False
    micro_batches: int = 1
    compiled: bool = False
    # The graph of a step is traced in its compute dtype.
    precision: Precision = OWN
    # False: the recompute of a layer stops when all saved tensors are back, as ours does. True: it runs all ops, as
    # reentrant checkpoints do, which other software uses.
    recompute_to_end: bool = False
    # Cluster levels that the user chose for axes: `{"dp": "network"}`.
    links: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def keeps_casts(self) -> bool:
        """Return whether micro-batches share weights in float8 that do not change between them."""
        # A compiler fuses the casts of each.
        return self.micro_batches > 1 and bool(self.precision.linears) and not self.compiled


# Form of the results: DTensors, whole tensors, or plain shards. With shards each rank computes a loss of its own, and
# gradients are those of the mean of these losses, or of their sum. `loss` returns scalars alone.
Outputs = Literal["sharded", "full", "local", "local_sum", "loss"]


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients of this dtype add up over the micro-batches of a call."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
