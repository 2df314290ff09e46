"""The cluster of this machine, for requests that name none."""

from __future__ import annotations

import torch

from autopar.cost.hardware.cluster import Cluster, load_cluster, shipped_for
from autopar.errors import AutoparError

__all__ = ["LOCAL", "cluster_here"]

LOCAL = "local-cpu"


def cluster_here() -> Cluster:
    """Return the cluster of this machine: by the name and memory of its GPU, or `local-cpu`."""
    if not torch.cuda.is_available():
        return load_cluster(LOCAL)
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    found = shipped_for(properties.name, properties.total_memory)
    if found is None:
        raise AutoparError(
            f"no cluster has a device '{properties.name}' with {properties.total_memory / 1e9:.0f} GB\n"
            f"fix: measure it, autopar calibrate --output mine.toml, and give cluster='mine.toml'; or name a similar "
            f"cluster with this memory: cluster='h100', memory='{properties.total_memory / 2**30:.0f}GiB'"
        )
    return found
