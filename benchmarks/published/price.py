"""What the cost model says of a published run: its stages from the parts of its model, its step from the schedule."""

from __future__ import annotations

from autopar.cost.cluster import Cluster, load_cluster
from autopar.cost.comm import Network
from autopar.cost.evaluate import beside_seconds
from autopar.cost.pipeline import StageCosts, pipeline
from benchmarks.published.parts import Amounts, Parts, parts_of
from benchmarks.published.runs import Run, Software
from benchmarks.published.stages import Stage, stages_of
from benchmarks.published.tables import Priced

__all__ = ["price"]


def price(run: Run) -> Priced:
    """The time of a step and the memory of the fullest device, in the fastest of the ways that it may have gone."""
    tried = [_priced(way, run) for way in (run, *run.tries)]
    return min(tried, key=lambda one: (not one.fits, one.step_seconds))


def _priced(way: Run, run: Run) -> Priced:
    cluster = load_cluster(way.cluster)
    parts = parts_of(way)
    if way.one_block:
        block = parts.block
        return Priced(run, block.forward_seconds + block.backward_seconds, None, True)
    plan = stages_of(way.decoder, way.pp, way.balanced)
    stages = [_amounts(stage, parts) for stage in plan]
    send = _send_seconds(way)
    costs = pipeline([_stage_costs(one, send, cluster) for one in stages], way.micro_batches, way.schedule, way.chunks)
    end = max(_end_seconds(one, way.software, cluster) for one in stages)
    if not way.weighed:
        return Priced(run, costs.seconds + end, None, True)
    whole = [
        size + (parts.passing_bytes if stage.last else 0.0)
        for size, stage in zip(costs.memory_bytes, plan, strict=True)
    ]
    return Priced(run, costs.seconds + end, max(whole), max(whole) <= cluster.device.memory_bytes)


def _end_seconds(one: Amounts, software: Software, cluster: Cluster) -> float:
    """What a stage does once per step: the last backward may hide reductions, the first forward gathers."""
    reduced = beside_seconds(one.once_seconds, one.backward_seconds if software.overlaps else 0.0, cluster)
    room = one.forward_seconds if software.overlaps and software.gathers_beside else 0.0
    return reduced + beside_seconds(one.gathered_seconds, room, cluster) + one.optimizer_seconds


def _amounts(stage: Stage, parts: Parts) -> Amounts:
    total = parts.block * stage.blocks
    total = total + parts.before if stage.first else total
    return total + parts.after if stage.last else total


def _stage_costs(one: Amounts, send_seconds: float, cluster: Cluster) -> StageCosts:
    """Of a micro-batch; a host that is slower than its device sets the pace."""
    computing = one.forward_seconds + one.backward_seconds
    device = computing + beside_seconds(one.each_seconds, computing, cluster)
    slower = max(device, one.host_seconds) / computing if computing else 1.0
    return StageCosts(
        slower * one.forward_seconds,
        slower * one.backward_seconds,
        send_seconds,
        one.held_bytes,
        one.saved_bytes,
    )


def _send_seconds(run: Run) -> float:
    """The stream of one micro-batch from a stage to the next; with sequence parallelism each rank sends its part."""
    if run.pp == 1:
        return 0.0
    network = Network(load_cluster(run.cluster), {"pp": run.pp, "dp": run.dp, "tp": run.tp})
    width = run.decoder.d_model * run.decoder.dtype.itemsize / (run.tp if run.sequence_parallel else 1)
    return network.seconds("send", ("pp",), run.micro_batch * run.decoder.seq * width)
