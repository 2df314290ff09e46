"""Memory of a CPU that stands for memory of a host, where processes of the CPU stand for devices."""

from __future__ import annotations

import torch
from torch import Tensor

# Attribute of storages that stand for memory of the host, where the device is a CPU.
ON_HOST = "_autopar_on_host"


def simulated_host_memory(count: int) -> Tensor:
    """Return bytes of a CPU that stand for memory of a host: counts of the device's memory leave them out."""
    storage = torch.UntypedStorage(count)  # type: ignore[no-untyped-call]
    setattr(storage, ON_HOST, True)
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (count,), (1,))
