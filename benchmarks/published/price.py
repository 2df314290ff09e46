"""Price of a published run by the cost model: stages from the parts of its model, the step from the schedule."""

from __future__ import annotations

from autopar.cost.hardware.cluster import Cluster, load_cluster
from autopar.cost.network import Network
from autopar.cost.overlap import OverlapCost
from autopar.cost.pipeline import StageCosts, pipeline
from autopar.submesh import SubMesh
from benchmarks.published.parts import Amounts, Parts, parts_of
from benchmarks.published.priced import Priced
from benchmarks.published.runs import Run
from benchmarks.published.stages import Stage, stages_of

__all__ = ["price"]


def price(run: Run) -> Priced:
    """Return the time of a step and the peak memory, in the fastest of the ways that the run may have gone."""
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
    costs = pipeline(
        [_stage_costs(one, send, cluster, way) for one in stages], way.micro_batches, way.schedule, way.chunks
    )
    end = max(_end_seconds(one, way, cluster) for one in stages) + _tied_seconds(way)
    if not way.weighted:
        return Priced(run, costs.seconds + end, None, True)
    whole = [
        size + (parts.passing_bytes if stage.last else 0.0)
        for size, stage in zip(costs.memory_bytes, plan, strict=True)
    ]
    reserved = max(whole) * way.software.reserved_per_live
    return Priced(run, costs.seconds + end, reserved, reserved <= cluster.device.memory_bytes)


def _end_seconds(one: Amounts, run: Run, cluster: Cluster) -> float:
    """Return the seconds of a stage once per step; the last backward may hide reductions, the first forward gathers."""
    software = run.software
    if software.sums_at_once and run.sharding == "zero1" and run.dp > 1:
        network = _network(run)
        sent = network.seconds("all_reduce", ("dp",), one.reduced_bytes)
        sent += network.seconds("all_gather", ("dp",), one.gathered_bytes)
        taken_out = PIECE_OPS * one.parameters * run.dp * cluster.device.launch_seconds
        return sent + taken_out + one.optimizer_seconds
    overlap = OverlapCost.of(cluster)
    reduced = overlap.seconds(one.once_seconds, one.backward_seconds if software.overlaps else 0.0)
    room = one.forward_seconds if software.overlaps and software.gathers_beside else 0.0
    return reduced + overlap.seconds(one.gathered_seconds, room) + one.optimizer_seconds


def _tied_seconds(run: Run) -> float:
    """Return the sum of the gradients of a table that the first and the last stage both have."""
    if not (run.software.sums_tied and run.decoder.tied and run.pp > 1):
        return 0.0
    axes = SubMesh({"ends": 2, "between": run.pp // 2, "dp": run.dp, "tp": run.tp})
    size = run.decoder.vocab * run.decoder.d_model / run.tp * run.software.reduce_dtype.itemsize
    return Network(load_cluster(run.cluster), axes).seconds("all_reduce", ("ends",), size)


def _amounts(stage: Stage, parts: Parts) -> Amounts:
    total = parts.block * stage.blocks
    total = total + parts.before if stage.first else total
    return total + parts.after if stage.last else total


def _stage_costs(one: Amounts, send_seconds: float, cluster: Cluster, run: Run) -> StageCosts:
    """Return the costs of a micro-batch; a host that is slower than its device determines the time.

    Where a stage reads on its host what the other sends of a tensor's sizes, it cannot run ahead of what arrives: then
    forward and backward each wait for it.
    """
    computing = one.forward_seconds + one.backward_seconds
    hidden = OverlapCost.of(cluster).seconds(one.each_seconds, computing)
    share = hidden / computing if computing else 0.0
    devices = (1 + share) * one.forward_seconds, (1 + share) * one.backward_seconds
    hosts = one.forward_host_seconds, one.backward_host_seconds
    if run.pp > 1 and run.software.send_rounds > 1:
        forward, backward = (max(pair) for pair in zip(devices, hosts, strict=True))
    else:
        slower = max(1.0, sum(hosts) / sum(devices)) if computing else 1.0
        forward, backward = (slower * seconds for seconds in devices)
    return StageCosts(forward, backward, send_seconds, one.held_bytes, one.saved_bytes)


def _send_seconds(run: Run) -> float:
    """Return the seconds to send one micro-batch to the next stage; sequence parallelism sends each rank's part."""
    if run.pp == 1:
        return 0.0
    width = run.decoder.d_model * run.decoder.dtype.itemsize / (run.tp if run.sequence_parallel else 1)
    network, size = _network(run), run.micro_batch * run.decoder.seq * width
    small = (run.software.send_rounds - 1) * network.seconds("send", ("pp",), SMALL_BYTES)
    return small + network.seconds("send", ("pp",), size)


# Each rank's piece of each parameter that was gathered in one call is cut out of the buffer and copied.
PIECE_OPS = 2
# Bytes of a message that announces the next tensor.
SMALL_BYTES = 64


def _network(run: Run) -> Network:
    return Network(load_cluster(run.cluster), SubMesh({"pp": run.pp, "dp": run.dp, "tp": run.tp}))
