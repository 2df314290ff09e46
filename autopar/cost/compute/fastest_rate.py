"""Rate that no op of a device exceeds, for lower bounds on the time of a step."""

from __future__ import annotations

import torch

from autopar.cost.compute.attention_time import least_attention_ratio
from autopar.cost.compute.product_time import least_product_ratio
from autopar.cost.compute.rates import peak_of
from autopar.cost.hardware.cluster import Device

__all__ = ["fastest_flops_per_second"]


def fastest_flops_per_second(device: Device, dtype: torch.dtype) -> float:
    """Return the peak of a dtype, or more where a measured op is faster than its formula."""
    return peak_of(device, dtype) / min(1.0, least_product_ratio(device, dtype), least_attention_ratio(device, dtype))
