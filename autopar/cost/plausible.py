"""Check the costs of a plan against what is known without the plan: a count of FLOPs by hand, the rate of a product."""

from __future__ import annotations

import torch

from autopar.cost.compute.expected_flops import expected_flops
from autopar.cost.compute.matmul_time import MatmulShape
from autopar.cost.compute.product_time import seconds_of_product
from autopar.cost.compute.rates import peak_of
from autopar.cost.costs import Costs
from autopar.cost.evaluate import dtype_of_most
from autopar.cost.hardware.cluster import Device
from autopar.ir.graph import NamedGraph, count_text
from autopar.ir.precision import Precision

# Counts that differ by more are not explained by what the formula leaves out.
MOST_RATIO = 1.5
# Rows and columns of a product that reaches the best rate of a device.
LARGE = 16384
# Dims of the widest heads that models have.
HEAD_DIMS = 128
# Shares of the peak within which two rates are the same.
TOLERANCE = 1.01


def doubts(graph: NamedGraph, costs: Costs, device: Device, precision: Precision) -> tuple[str, ...]:
    """Return what is implausible in the costs of a step."""
    found = []
    expected = expected_flops(graph)
    if expected is not None and costs.flops:
        ratio = costs.flops / expected.total
        if not 1 / MOST_RATIO <= ratio <= MOST_RATIO:
            terms = f"{count_text(round(expected.active_parameters))} active parameters, {expected.tokens:,} rows"
            found.append(f"{costs.flops:.3g} FLOPs a step are {ratio:.3g} times those counted by hand ({terms})")
    # The peak of unequal devices is a sum; each reaches its own share of it.
    reached = _reached(graph, device, precision)
    if not costs.kinds and costs.mfu > TOLERANCE * reached:
        found.append(f"{costs.mfu:.0%} of the peak is more than a large product reaches, {reached:.0%}")
    return tuple(f"implausible: {one}" for one in found)


def _reached(graph: NamedGraph, device: Device, precision: Precision) -> float:
    """Return the share of the peak that a large product reaches in the best dtype of a step."""
    own = dtype_of_most(graph)
    dtypes = (own, torch.float8_e4m3fn) if precision.linears else (own,)
    product = MatmulShape(1, LARGE, LARGE, LARGE)
    rates = []
    for dtype in dtypes:
        seconds = seconds_of_product(device, product, dtype)
        rates.append(product.flops / seconds * device.sustained_fraction)
    softmax = 1.0 + device.attention.softmax / HEAD_DIMS
    rates.append(device.attention.forward_fraction / softmax * peak_of(device, own) * device.sustained_fraction)
    return max(rates) / peak_of(device, own)
