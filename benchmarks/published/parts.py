"""The parts of a decoder and what each of them costs: what stands before the blocks, one block, what stands after.

A decoder of two blocks is traced and profiled as a whole; its tasks are in the order of the graph, so the blocks are
in the middle of the forward and of the backward. Any number of blocks, and any stage of a pipeline, follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import pairwise
from typing import TypeVar

import torch

from autopar.cost.compute.byte_time import seconds_of_bytes
from autopar.cost.compute.op_time import cast_work, local_bytes
from autopar.cost.hardware.cluster import Cluster, load_cluster
from autopar.cost.lowered_step import LoweredStep
from autopar.cost.memory.peak import memory
from autopar.cost.profile import profile
from autopar.cost.tasks import Task
from autopar.ir.analysis.float8_products import in_float8
from autopar.ir.graph import NamedGraph
from autopar.ir.precision import PRESETS, Precision
from autopar.sharding.assignment import StepPlan
from autopar.sharding.options import TrainingOptions
from autopar.sharding.time_slice import propagate_plan
from autopar.submesh import SubMesh
from benchmarks.published.models import Decoder
from benchmarks.published.runs import FLASH_2, Run, Sharding, Software, layout_of
from benchmarks.published.traces import BLOCKS, least_batch, traced, traced_decoder

__all__ = ["Amounts", "Parts", "parts_of"]

# Bytes of an element that is read in bfloat16 and written in float8 by rows and by columns.
TENSOR_CAST_BYTES = 2 + 1 + 1
# The place of the part after the blocks.
AFTER = 2


@dataclass(frozen=True)
class Amounts:
    """Time and memory of one part in one micro-batch."""

    # With the communication that ops wait for.
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    # Time to launch all kernels of the part.
    forward_host_seconds: float = 0.0
    backward_host_seconds: float = 0.0
    # Communication of parameters in every micro-batch.
    each_seconds: float = 0.0
    # Reduction of gradients in one micro-batch of a step.
    once_seconds: float = 0.0
    # Gathers of parameters, once per step, one by one.
    gathered_seconds: float = 0.0
    gathered_bytes: float = 0.0
    # Gradients, as they are sent.
    reduced_bytes: float = 0.0
    # Number of tensors.
    parameters: float = 0.0
    optimizer_seconds: float = 0.0
    # Parameters, gradients, optimizer state.
    held_bytes: float = 0.0
    # From the forward of a micro-batch to its backward.
    saved_bytes: float = 0.0

    def __add__(self, other: Amounts) -> Amounts:
        return Amounts(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    def __mul__(self, times: float) -> Amounts:
        return Amounts(*(times * getattr(self, one.name) for one in fields(self)))


@dataclass(frozen=True)
class Parts:
    before: Amounts
    block: Amounts
    after: Amounts
    # Held at the peak, at the loss, beyond what the forward keeps: gradients of values, temporaries.
    passing_bytes: float


def parts_of(run: Run) -> Parts:
    """Return the parts of a run's decoder, under its strategy on its cluster."""
    parts = _parts(Setting(traced_decoder(run.decoder), run))
    return replace(parts, after=_tied(parts.after, run)) if run.decoder.tied and run.pp == 1 else parts


def _tied(after: Amounts, run: Run) -> Amounts:
    """Return the amounts without the head's own matrix. One trace serves both kinds of models."""
    left = run.decoder.d_model / (run.decoder.d_model + run.decoder.vocab * run.decoder.d_model)
    return replace(
        after,
        each_seconds=left * after.each_seconds,
        once_seconds=left * after.once_seconds,
        gathered_seconds=left * after.gathered_seconds,
        gathered_bytes=left * after.gathered_bytes,
        reduced_bytes=left * after.reduced_bytes,
        parameters=after.parameters - 1,
        optimizer_seconds=left * after.optimizer_seconds,
        held_bytes=left * after.held_bytes,
    )


@dataclass(frozen=True, eq=False)
class Setting:
    """All that parts depend on; runs that differ in anything else share them."""

    decoder: Decoder
    run: Run

    @property
    def key(self) -> tuple[object, ...]:
        run = self.run
        strategy = (run.dp, run.tp, run.pp, run.sharding, run.regathers, run.sequence_parallel, run.recompute)
        several = run.micro_batches > 1
        return self.decoder, run.cluster, strategy, several, run.micro_batch, run.weighted, run.software

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Setting) and self.key == other.key


@cache
def _parts(setting: Setting) -> Parts:
    run = setting.run
    graph = traced(setting.decoder, run.micro_batch * run.dp)
    plan = _plan(graph, run)
    cluster = _cluster(run)
    wired = LoweredStep(graph, plan)
    found = profile(wired, cluster)
    forward, backward = _cut(_own(found.forward)), _cut(_own(found.backward[::-1]))
    elements = _elements(graph, plan)
    counts = [sum(_part_of(tensor.name) == i for tensor in graph.parameters) for i in range(3)]
    saved, held, passing = [0.0] * 3, 0.0, 0.0
    if run.weighted:
        fill = memory(wired)
        saved = _saved(graph, plan)
        if not run.software.gathers_again and run.recompute == "none":
            saved = [size + _gathered_bytes(tasks, run.tp) for size, tasks in zip(saved, forward, strict=True)]
        held = fill.parameters_bytes + fill.copies_bytes + fill.gradients_bytes + fill.optimizer_bytes
        passing = max(0.0, fill.peak_bytes - held - fill.saved_bytes)
    optimizer = sum(task.seconds for task in found.optimizer)
    amounts = []
    for i in range(3):
        tasks = (*forward[i], *backward[i])
        loss = _loss_seconds(forward[i], backward[i], run, cluster) if i == AFTER else (0.0, 0.0)
        extra_seconds, *extra_host = _beside_gathers(forward[i], backward[i], run.software, cluster.device.host_seconds)
        share = elements[i] / sum(elements)
        amounts.append(
            Amounts(
                sum(task.seconds for task in forward[i] if not (task.overlapped or task.once)) + loss[0],
                sum(task.seconds for task in backward[i] if not (task.overlapped or task.once))
                + extra_seconds
                + loss[1],
                sum(task.host_seconds for task in forward[i] if not task.once) + extra_host[0],
                sum(task.host_seconds for task in backward[i] if not task.once) + extra_host[1],
                sum(task.seconds for task in tasks if task.overlapped and not task.once),
                sum(task.seconds for task in backward[i] if task.overlapped and task.once),
                sum(task.seconds for task in forward[i] if task.overlapped and task.once),
                sum(task.bytes for task in forward[i] if task.overlapped and task.once),
                sum(task.bytes for task in backward[i] if task.overlapped and task.once),
                counts[i],
                share * optimizer + sum(task.seconds for task in tasks if task.once and not task.overlapped),
                share * held,
                saved[i],
            )
        )
    before, blocks, after = amounts
    if run.software.delayed_scales:
        blocks = _with_delayed_scales(blocks, graph, plan, cluster)
    waited = sum(map(_is_waited, forward[1])) / BLOCKS, sum(map(_is_waited, backward[1])) / BLOCKS
    return Parts(before, _with_software(blocks * (1 / BLOCKS), run, cluster, waited), after, passing)


def _with_software(block: Amounts, run: Run, cluster: Cluster, waited: tuple[float, float]) -> Amounts:
    """Return a block with what the authors' software takes beyond its ops; `waited` counts collectives of values."""
    software = run.software
    more_host = software.block_launches * cluster.device.host_seconds + software.block_host_seconds
    more_host += software.tp_host_seconds if run.tp > 1 else 0.0
    hosts = block.forward_host_seconds + more_host / 2, block.backward_host_seconds + more_host / 2
    if run.pp > 1 and run.nodes > 1:
        least, of_rank = software.pipeline_floor_seconds
        longer = max(1.0, (least + of_rank * run.tp) / sum(hosts))
        hosts = hosts[0] * longer, hosts[1] * longer
    nodes = run.tp / (cluster.ranks_per_node or run.tp)
    more = software.node_seconds * nodes if nodes > 1 else 0.0
    return replace(
        block,
        forward_seconds=block.forward_seconds + more * waited[0],
        backward_seconds=block.backward_seconds + more * waited[1],
        forward_host_seconds=hosts[0],
        backward_host_seconds=hosts[1],
    )


def _with_delayed_scales(blocks: Amounts, graph: NamedGraph, plan: StepPlan, cluster: Cluster) -> Amounts:
    """Return the blocks with the casts of TransformerEngine: a kernel reads a tensor, writes it by rows and by columns.

    Ours cast both operands of each product anew. A block that is computed again casts again.
    """
    device, precision = cluster.device, plan.options.precision
    more = [[0.0, 0.0], [0.0, 0.0]]
    for node in graph.nodes:
        if not (node.name.startswith("blocks.") and in_float8(node, graph.tensors, precision)):
            continue
        ops = plan.assignment.ops[node.name]
        names = (*zip(node.operands[:2], ops.operands[:2], strict=True), (node.outputs[0], ops.produced[0]))
        x, weight, y = (
            local_bytes(graph, name, layout, plan.axes) / graph.tensors[name].element_bytes
            for name, layout in names
            if name is not None and layout is not None
        )
        # Forward: both operands. Backward: each is cast again, and the gradient of the result twice.
        for i, (ours, theirs) in enumerate((((x, weight), (x, weight)), ((x, weight, y, y), (y,)))):
            casts = [cast_work(size, device) for size in ours]
            more[i][0] += sum(seconds_of_bytes(TENSOR_CAST_BYTES * size, device) for size in theirs)
            more[i][0] -= sum(cast.seconds for cast in casts)
            more[i][1] += (len(theirs) - sum(cast.launches for cast in casts)) * device.host_seconds
    if "full" in plan.recompute.values():
        more[1] = [sum(pair) for pair in zip(*more, strict=True)]
    return replace(
        blocks,
        forward_seconds=blocks.forward_seconds + more[0][0],
        backward_seconds=blocks.backward_seconds + more[1][0],
        forward_host_seconds=blocks.forward_host_seconds + more[0][1],
        backward_host_seconds=blocks.backward_host_seconds + more[1][1],
    )


def _loss_seconds(forward: Sequence[Task], backward: Sequence[Task], run: Run, cluster: Cluster) -> tuple[float, float]:
    """Return the seconds of the authors' loss beyond torch's, in each direction."""
    if run.software.logit_bytes is None:
        return 0.0, 0.0
    logits = run.micro_batch * run.decoder.seq * run.decoder.vocab / run.tp
    ours = [sum(task.seconds for task in tasks if _is_of_loss(task)) for tasks in (forward, backward)]
    theirs = [count * logits / cluster.device.stream for count in run.software.logit_bytes]
    return theirs[0] - ours[0], theirs[1] - ours[1]


def _is_of_loss(task: Task) -> bool:
    """Return True for ops of the loss: the model computes it, modules compute all else after the blocks."""
    return task.kind == "compute" and task.name.startswith("/")


def _beside_gathers(
    forward: Sequence[Task], backward: Sequence[Task], software: Software, launch_seconds: float
) -> tuple[float, float, float]:
    """Return the cost of gathered values beyond the plan: device seconds backward, host seconds in each direction.

    What is gathered again in the backward comes while the product that does not need it runs.
    """
    seconds = again = 0.0
    for task, following in pairwise(forward):
        if _is_gather(task) and software.gathers_again:
            seconds += max(0.0, task.seconds - following.seconds)
            again += task.host_seconds
    more = (software.pieces - 1) * launch_seconds
    counts = [sum(map(_is_gather, tasks)) for tasks in (forward[:-1], backward)]
    return seconds, more * counts[0], more * counts[1] + again


def _gathered_bytes(forward: Sequence[Task], tp: int) -> float:
    """Return the bytes of gathered values beyond the rank's own part."""
    return sum(task.bytes * (1 - 1 / tp) for task in forward if _is_gather(task))


def _is_waited(task: Task) -> bool:
    return task.sends and not task.overlapped


def _is_gather(task: Task) -> bool:
    return task.kind == "all_gather" and not task.overlapped


# -- which part -------------------------------------------------------------------------------------------------------

Item = TypeVar("Item")


def _own(tasks: Sequence[Task]) -> list[Task]:
    """Return the tasks of the authors' code, too: their optimizers write parameters in the dtype of the compute."""
    return [task for task in tasks if not task.name.endswith(" cast")]


def _cut(tasks: Sequence[Task]) -> tuple[Sequence[Task], ...]:
    return _cut_by(tasks, lambda task: task.name.startswith("blocks."))


def _cut_by(items: Sequence[Item], is_inside: Callable[[Item], bool]) -> tuple[Sequence[Item], ...]:
    """Return the items before the blocks, the blocks, and the items after them."""
    inside = [i for i, item in enumerate(items) if is_inside(item)]
    return items[: inside[0]], items[inside[0] : inside[-1] + 1], items[inside[-1] + 1 :]


def _elements(graph: NamedGraph, plan: StepPlan) -> list[float]:
    """Return the parameters of each part that one rank stores."""
    counts = [0.0, 0.0, 0.0]
    for tensor in graph.parameters:
        size = local_bytes(graph, tensor.name, plan.assignment.stored[tensor.name], plan.axes)
        counts[_part_of(tensor.name)] += size / tensor.dtype.itemsize
    return counts


def _part_of(parameter: str) -> int:
    module = parameter.split(".")[0]
    return 1 if module == "blocks" else AFTER if module in ("norm", "head") else 0


def _saved(graph: NamedGraph, plan: StepPlan) -> list[float]:
    """Return the bytes that each part saves for the backward; inputs only for recomputed blocks."""
    cut = _cut_by(graph.nodes, lambda node: node.name.startswith("blocks."))
    place = {name: i for i, nodes in enumerate(cut) for node in nodes for name in node.outputs if name is not None}
    makers = {node.node: i for i, nodes in enumerate(cut) for node in nodes}
    sizes = [0.0, 0.0, 0.0]
    for tensor in graph.saved:
        if tensor.kind == "activation":
            sizes[place[tensor.name]] += local_bytes(graph, tensor.name, plan.assignment.values[tensor.name], plan.axes)
    ops = {node.node: plan.assignment.ops[node.name] for node in graph.nodes}
    for kept in graph.saved_inside:
        ranks = 1
        for axis in ops[kept.node].choice.axes:
            ranks *= plan.axes[axis]
        sizes[makers[kept.node]] += kept.bytes / ranks
    if set(plan.recompute.values()) == {"full"}:
        first = cut[0][-1].outputs[0]
        assert first is not None, "the stream enters the blocks"
        sizes[1] = BLOCKS * local_bytes(graph, first, plan.assignment.values[first], plan.axes)
    return sizes


# -- cluster, graph and plan ------------------------------------------------------------------------------------------


def _cluster(run: Run) -> Cluster:
    """Return the cluster, with attention as fast as the kernel that the run had."""
    cluster, share = load_cluster(run.cluster), run.software.attention_fraction
    rates = FLASH_2.get(cluster.device.name, cluster.device.attention)
    slower = replace(
        rates, forward_fraction=share * rates.forward_fraction, backward_fraction=share * rates.backward_fraction
    )
    return replace(cluster, device=replace(cluster.device, attention=slower))


def _precision(run: Run) -> Precision:
    """Return float32 masters and states, with the dtypes in which the run's software multiplies and adds up."""
    compute, reduce = (
        {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
        for dtype in (run.decoder.dtype, run.software.gradient_dtype)
    )
    return replace(PRESETS[compute], reduce=reduce, linears=run.software.linears)


def _plan(graph: NamedGraph, run: Run) -> StepPlan:
    """Return the run's strategy as a plan: stages are furthest apart, tensor-parallel ranks next to each other."""
    # A strategy says the same of a micro-batch of any size.
    decoder = traced_decoder(run.decoder)
    batch = least_batch(decoder, run.micro_batch * run.dp, run.dp)
    found = _propagated(decoder, batch, run.sharding, run.sequence_parallel, run.dp, run.tp)
    axes = SubMesh({"pp": run.pp, "dp": run.dp, "tp": run.tp})
    plan = StepPlan(graph.fingerprint, replace(found.assignment, axes=axes))
    layers = dict.fromkeys(graph.ops_of_layers, run.recompute)
    parameters = [tensor.name for tensor in graph.parameters]
    options = TrainingOptions(
        local_inputs=True,
        micro_batches=run.micro_batches,
        precision=_precision(run),
        compiled=run.software.compiled,
        recompute_to_end=run.software.recomputes_to_end,
    )
    return plan.with_regather(parameters if run.regathers else ()).with_recompute(layers).with_options(options)


@cache
def _propagated(
    decoder: Decoder, batch: int, sharding: Sharding, sequence_parallel: bool, dp: int, tp: int
) -> StepPlan:
    """Return the strategy without stages: no tensor is split along their axis."""
    graph = traced(decoder, batch)
    return propagate_plan(graph, layout_of(sharding, sequence_parallel, dp, tp), SubMesh({"dp": dp, "tp": tp}))
