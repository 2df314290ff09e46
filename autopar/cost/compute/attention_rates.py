"""Rates of fused attention: by the head dims, the mask, and the keys that a query sees."""

from __future__ import annotations

from autopar.cost.hardware.cluster import AttentionRates

__all__ = ["attention_fractions"]


def attention_fractions(
    rates: AttentionRates, width: int, seen_keys: float, is_causal: bool, calls: int = 1
) -> tuple[float, float]:
    """Return the shares of the peak that the forward and the backward reach.

    Parameters:
        width: dims of the keys of a head and of its values, added up.
        seen_keys: keys that a query sees on average; `calls` kernels share them.
    """
    # Each tile of queries starts and ends once in each call, however few keys it sees.
    started = seen_keys / (seen_keys + rates.start_keys * calls) if seen_keys else 1.0
    forward = rates.forward_fraction * (rates.causal_fraction if is_causal else 1.0)
    forward *= width / (width + 2 * rates.softmax)
    backward = rates.backward_fraction * (rates.causal_backward_fraction if is_causal else 1.0)
    return forward * started, backward * started
