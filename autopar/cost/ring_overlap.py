"""Time of keys that pass from rank to rank beside the products: what these do not hide."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from autopar.cost.overlap import OverlapCost
from autopar.cost.reshard_costs import ReshardCosts
from autopar.sharding.reshard_insertion import InsertedReshard

__all__ = ["RingTraffic", "ring_traffic"]


class RingTraffic(NamedTuple):
    """All hops of one direction: their bytes, the seconds that are exposed, the seconds of the host."""

    kind: str
    axes: tuple[str, ...]
    bytes: float
    seconds: float
    host_seconds: float


def ring_traffic(
    one: InsertedReshard, way: str, work_seconds: float, costs: ReshardCosts, overlap: OverlapCost, parts: int = 1
) -> Iterator[RingTraffic]:
    """Yield the hops of a direction; `work_seconds` are those of the op on the keys of all ranks.

    Keys of several `parts` pass one after the other.
    """
    steps = one.reshard.forward if way == "forward" else one.reshard.backward if one.differentiable else ()
    beside = [share * work_seconds / parts for share in one.beside]
    hops = len(beside) - 1
    launch = costs.network.cluster.library.host_seconds.get("send", costs.launch_seconds)
    for step in steps:
        size = float(one.bytes_of(step))
        # In the backward a half of the messages are gradients.
        messages = hops if way == "forward" else 2 * hops
        hop = costs.network.seconds("send", step.axes, size / messages / parts)
        seconds = 0.0
        for number, own in enumerate(beside):
            # Keys of the next block come, and gradients of the last one go; those of the own keys stay.
            sent = hop * ((number < hops) + (way == "backward" and number > 1))
            seconds += overlap.seconds(sent, own)
        # The last gradients go beside nothing.
        seconds += hop if way == "backward" else 0.0
        yield RingTraffic(step.kind.value, step.axes, size, parts * seconds, parts * messages * launch)
