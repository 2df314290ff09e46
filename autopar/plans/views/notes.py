"""Notes on a plan: what a reader of its numbers has to know."""

from __future__ import annotations

from autopar.cost.compute.rates import rate_notes
from autopar.cost.plausible import doubts
from autopar.ir.values import DOCUMENTS
from autopar.plans.record import PlanRecord
from autopar.plans.views.confidence import range_notes
from autopar.plans.views.ranks import shares_notes
from autopar.sharding.sharding import ROUTING_IMBALANCE

__all__ = ["notes"]


def notes(plan: PlanRecord) -> list[str]:
    """Return notes on a plan: its range, idle axes, whole dims, shares, pieces, rates, doubts, documents, experts."""
    found = range_notes(plan.time_range)
    idle = _idle_axes(plan)
    if idle:
        why = "; communication would take longer" if plan.origin == "search" else ""
        every = len(idle) == sum(size > 1 for size in plan.decided.mesh.values())
        text = (
            "nothing is split: every device" if every else f"nothing is split over {', '.join(idle)}: each rank of it"
        )
        found.append(f"{text} computes {'everything' if every else 'the same'}{why}")
    found += plan.left_whole
    found += shares_notes(plan) + plan.network.placement_notes()
    if plan.graph.loss_pieces is not None:
        pieces = plan.graph.loss_pieces
        found.append(f"the last layer and the loss in {pieces} pieces: a rank has the logits of one of them")
    if plan.graph.capacity is not None:
        slots = f"{plan.graph.capacity:g} times the mean of the rows of a sample"
        found.append(f"an expert takes at most {slots}: further rows are dropped, which changes results")
    for rate in rate_notes(plan.graph, plan.cluster.device):
        found.append(f"the device has no rate for a dtype of the model: priced {rate}")
    for doubt in doubts(plan.graph, plan.costs, plan.cluster.device, plan.decided.options.precision):
        found.append(doubt)
    split = _split_groups(plan)
    found += _document_notes(plan)
    if split:
        busiest = f"assumed {ROUTING_IMBALANCE} times the mean on the busiest rank"
        found.append(f"rows go to their experts over {', '.join(split)}: {busiest}")
    return found


def _document_notes(plan: PlanRecord) -> list[str]:
    """Return how the scores of documents are priced: their number depends on data."""
    noted = (node.attention for node in plan.graph.nodes if node.attention is not None)
    shares = sorted({one.document_share or 0.0 for one in noted if one.mask.startswith(DOCUMENTS)})
    if not shares:
        return []
    if not shares[0]:
        return ["attention of documents is priced as one document in each sample: the example inputs have no data"]
    between = " to ".join(dict.fromkeys(f"{share:.2g}" for share in (shares[0], shares[-1])))
    return [f"attention of documents is priced at {between} of all scores, as in the example inputs"]


def _split_groups(plan: PlanRecord) -> list[str]:
    """Return the axes that split the groups of routed rows, such as experts."""
    found: dict[str, None] = {}
    for name, sharding in plan.decided.assignment.values.items():
        tensor = plan.graph.tensors[name]
        found.update(dict.fromkeys(axis for axes in sharding.splits[: tensor.routed] for axis in axes))
    return [axis for axis in plan.decided.mesh if axis in found]


def _idle_axes(plan: PlanRecord) -> list[str]:
    """Return the axes that split no tensor and have no stages."""
    assignment = plan.decided.assignment
    used = {axis for each in (assignment.values, assignment.stored) for one in each.values() for axis in one.axes}
    return [axis for axis, size in plan.decided.axes.items() if size > 1 and axis not in used]
