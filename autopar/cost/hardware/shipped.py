"""Which of the clusters that autopar ships has a device, by the name that its driver gives and by its memory."""

from __future__ import annotations

import re

from autopar.cost.hardware.cluster import Cluster, cluster_names, load_cluster

__all__ = ["shipped_for"]

NEAR = 0.15
"""A driver gives a few percent more or less than the datasheet; another kind of a device has a fifth more, or half."""


def shipped_for(device: str, memory_bytes: float) -> Cluster | None:
    """Return the plainest cluster of such devices: `a100-80` of an `NVIDIA A100-SXM4-80GB`; None if there is none.

    The first part of a cluster's name must be a word of the device's: a GH200 is no H200.
    """
    words = set(re.findall(r"[a-z0-9]+", device.lower()))
    named = [load_cluster(name) for name in cluster_names() if name.split("-")[0] in words]
    near = [one for one in named if abs(memory_bytes / one.device.memory_bytes - 1) <= NEAR]
    return min(near, key=lambda one: (len(one.name), one.name), default=None)
