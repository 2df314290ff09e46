"""Values in their layouts, as the generated graph holds them: when each is used last, and which are trained by."""

from __future__ import annotations

from math import inf

from autopar.ir.graph import NamedGraph
from autopar.sharding.reshard_insertion import ReshardPlan
from autopar.sharding.sharding import Sharding

__all__ = ["Version", "last_uses", "results_of"]

Version = tuple[str, Sharding]
"""A value in one of its layouts."""


def last_uses(graph: NamedGraph, reshard_plan: ReshardPlan) -> dict[Version, float]:
    """The place of the op that uses a version last; what is handed out stays."""
    found: dict[Version, float] = {}
    for place, node in enumerate(graph.nodes):
        wired = reshard_plan.ops[node.name]
        for version in wired.operands:
            if version is not None:
                found[version] = place
        for one in (*wired.before, *wired.after):
            found[one.tensor, one.reshard.source] = place
    for one in reshard_plan.outputs:
        found[one.tensor, one.reshard.source] = inf
    for result in reshard_plan.results:
        if result is not None:
            found[result] = inf
    return found


def results_of(graph: NamedGraph, reshard_plan: ReshardPlan) -> list[Version]:
    """The results that have a gradient: the loss, where there is one."""
    found = [place for place in reshard_plan.results if place is not None]
    found = [version for version in found if graph.tensors[version[0]].requires_grad]
    scalars = [version for version in found if not graph.tensors[version[0]].shape]
    return scalars or found
