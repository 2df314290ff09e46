"""Uses of the versions of tensors: the last one of each, and the results that have a gradient."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from autopar.cost.lowered_step import Version
from autopar.ir.graph import NamedGraph
from autopar.ir.values import NamedNode
from autopar.sharding.reshard_insertion import InsertedReshard, ReshardPlan

__all__ = ["differentiable_results", "last_uses"]


def last_uses(
    nodes: Iterable[NamedNode], reshard_plan: ReshardPlan, elsewhere: Mapping[str, Sequence[InsertedReshard]]
) -> dict[Version, str]:
    """Return the last op that uses each version; results of the module have no end.

    `elsewhere` has more reshards before some ops.
    """
    found: dict[Version, str] = {}
    for node in nodes:
        reshards = reshard_plan.ops[node.name]
        for version in reshards.operands:
            if version is not None:
                found[version] = node.name
        for one in (*elsewhere.get(node.name, ()), *reshards.before, *reshards.after):
            found[one.tensor, one.source] = node.name
    for one in reshard_plan.outputs:
        found[one.tensor, one.source] = ""
    found.update((result, "") for result in reshard_plan.results if result is not None)
    return found


def differentiable_results(graph: NamedGraph, reshard_plan: ReshardPlan) -> list[Version]:
    """Return the results with a gradient: the loss where one is scalar, else all."""
    found = [version for version in reshard_plan.results if version is not None]
    found = [version for version in found if graph.tensors[version[0]].requires_grad]
    scalars = [version for version in found if not graph.tensors[version[0]].shape]
    return scalars or found
