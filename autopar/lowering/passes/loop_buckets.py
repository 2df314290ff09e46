"""Hand buckets to the loop over micro-batches that alone reads them.

The loop then gathers and reduces them beside its compute, instead of before its first and after its last micro-batch.

Input::

    s = bucket_start(w_shard)
    w, = bucket_end(s)
    loss = micro_batches(x, w)
Output::

    loss = micro_batches(x, w_shard)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.fx import Graph, Node

from autopar.ir.graph import NamedGraph
from autopar.lowering.collectives.process_groups import Groups
from autopar.lowering.modules.bucket_ends import BucketEnd
from autopar.lowering.modules.late_weights import LateProduct
from autopar.lowering.modules.loop_buckets import ClosingBucket, LoopBucket, LoopBuckets
from autopar.lowering.modules.micro_loop import DividedFromLoop, MicroBatchLoop
from autopar.lowering.modules.pipeline_loop import PipelineLoop
from autopar.lowering.modules.shard_ops import LoweredOpModule, ReshardModule
from autopar.lowering.passes.bucket_parameters import loop_with
from autopar.sharding.options import Outputs
from autopar.sharding.reshard.reshard import Reshard
from autopar.sharding.schedules import BackwardHalf, StageTask, TaskKind, reductions_after

__all__ = ["put_in_loops"]

Loop = MicroBatchLoop | PipelineLoop
DIVIDED = "divided_from_loop"


def put_in_loops(
    graph: Graph, modules: dict[str, nn.Module], outputs: Outputs, traced: NamedGraph, groups: Groups
) -> None:
    """Hand buckets to loops, in place; `graph` is made from the traced one."""
    every = [one for one in modules.values() if isinstance(one, MicroBatchLoop | PipelineLoop)]
    if every and any(tensor.dtype is torch.float16 for tensor in traced.tensors.values()):
        for each in every:
            each.everybody = groups.everybody
    # A loss of each rank alone may get another gradient on each.
    is_common = outputs not in ("local", "local_sum")
    found: dict[Node, list[LoopBucket]] = {}
    for ended in list(graph.nodes):
        end = _module(ended, modules)
        if not isinstance(end, BucketEnd):
            continue
        values = list(ended.users)
        loops = {loop_with(value, modules) for value in values}
        loop_node = loops.pop() if len(loops) == 1 else None
        if loop_node is None or len(values) < len(end.running.bucket.conversions):
            continue
        arguments = list(loop_node.args)
        places = tuple(arguments.index(value) for value in values)
        (started,) = ended.args
        stored: Sequence[Node] = started.args if isinstance(started, Node) else started  # type: ignore[assignment]
        for place, one in zip(places, stored, strict=True):
            arguments[place] = one
        loop_node.args = tuple(arguments)
        start = _module(started, modules) if isinstance(started, Node) else None
        notes = getattr(end, "notes", ()) or getattr(start, "notes", ())
        found.setdefault(loop_node, []).append(LoopBucket(end.running, places, notes))
        for node in (*values, ended, *([started] if isinstance(started, Node) else ())):
            graph.erase_node(node)
            if node.op == "call_module":
                del modules[str(node.target)]
    for loop_node, buckets in found.items():
        loop = modules[str(loop_node.target)]
        assert isinstance(loop, MicroBatchLoop | PipelineLoop), loop_node
        loop.take_buckets(LoopBuckets(tuple(buckets), _closing(loop, buckets), is_common))
    _divide_from_loops(graph, modules)


def _divide_from_loops(graph: Graph, modules: dict[str, nn.Module]) -> None:
    """Let loops take no views of parameters whose gradients are sent before the loop, in place.

    A compiler takes what stands before a loop as a graph of its own. Of a result that is a view of an input, it makes
    the view again outside of that graph, whose backward then does not run.
    """
    sending: set[Node] = set()
    for node in list(graph.nodes):
        module = _module(node, modules)
        if _sends_gradients(module) or not sending.isdisjoint(node.all_input_nodes):
            sending.add(node)
        if not isinstance(module, MicroBatchLoop | PipelineLoop):
            continue
        # In the order of the inputs, which is that of all ranks.
        for source in [one for one in node.all_input_nodes if one in sending]:
            modules.setdefault(DIVIDED, DividedFromLoop())
            with graph.inserting_before(node):
                own = graph.call_module(DIVIDED, (source,))
            own.meta.update(source.meta)
            node.replace_input_with(source, own)


def _sends_gradients(module: nn.Module | None) -> bool:
    if isinstance(module, BucketEnd):
        return bool(module.running.bucket.backward)
    return isinstance(module, ReshardModule) and any(not step.local for step in module.conversion.backward)


def _module(node: Node, modules: Mapping[str, nn.Module]) -> nn.Module | None:
    return modules.get(str(node.target)) if node.op == "call_module" else None


def _closing(loop: Loop, buckets: Sequence[LoopBucket]) -> dict[StageTask, tuple[ClosingBucket, ...]]:
    """Return the buckets that are complete after each task, in the order of the backward."""
    if isinstance(loop, MicroBatchLoop):
        last = StageTask(TaskKind.BACKWARD, loop.count - 1)
        busy = _axes_sent(loop.body)
        ones = [ClosingBucket(one, frozenset(one.places if busy.isdisjoint(one.axes) else ())) for one in buckets]
        return {last: tuple(reversed(ones))}
    tasks = [item for item in loop.program if isinstance(item, StageTask) and item.kind is TaskKind.BACKWARD]
    # Gradients of tied parameters come from other stages, after the last task.
    tied = {one.place for one in loop.tied}
    found: dict[StageTask, list[ClosingBucket]] = {}
    after = reductions_after(tasks, loop.stages.stage)
    for bucket in reversed(buckets):
        readers = [
            task for task in tasks if not set(loop.parts[loop.stages.part_of(task)].inputs).isdisjoint(bucket.places)
        ]
        if not readers or not tied.isdisjoint(bucket.places):
            continue
        if readers[-1].chunk in after:
            found.setdefault(after[readers[-1].chunk], []).append(ClosingBucket(bucket))
            continue
        part = loop.parts[loop.stages.part_of(readers[-1])]
        if readers[-1].half is BackwardHalf.WEIGHTS:
            coming = _late_places(part.body)
        else:
            coming = set(part.inputs) if _axes_sent(part.body).isdisjoint(bucket.axes) else set()
        within = frozenset(coming.intersection(bucket.places))
        found.setdefault(readers[-1], []).append(ClosingBucket(bucket, within))
    return {task: tuple(ones) for task, ones in found.items()}


def _late_places(body: nn.Module) -> set[int]:
    """Return the places of weights and biases whose gradients are put off, if each has one product."""
    late = [module for module in body.modules() if isinstance(module, LateProduct)]
    places = [place for module in late for place in (module.weight, module.bias) if place is not None]
    return set(places) if len(set(places)) == len(places) else set()


def _axes_sent(body: nn.Module) -> set[frozenset[str]]:
    """Return the sets of axes that collectives of a graph run over."""
    reshards: list[Reshard] = []
    for module in body.modules():
        if isinstance(module, LoweredOpModule):
            reshards += [message.reshard for message in module.split.messages()]
        elif isinstance(module, BucketEnd):
            reshards += [one.reshard for one in module.running.bucket.conversions]
        else:
            bound = (*getattr(module, "conversions", ()), *filter(None, [getattr(module, "conversion", None)]))
            reshards += [one.reshard for one in bound]
    return {frozenset(step.axes) for one in reshards for step in (*one.forward, *one.backward) if not step.local}
