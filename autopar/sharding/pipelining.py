"""Stages of a pipeline: the part of the model that each op belongs to, and the stage that stores each parameter.

`pipeline pp 1f1b` makes the ranks along an axis stages. A part is a run of ops; part p runs on stage p modulo the
number of stages. Only ops of the micro-batches that follow from parameters belong to a part. Values that follow from
inputs alone, as masks, are computed in each part that reads them. Ops outside of the micro-batches run on each stage
that reads their results.

    pipeline pp 1f1b
    cut pp before @blocks.2      part 0: embedding, blocks 0 and 1; part 1: all from block 2 on

Without `cut` the parts have about equal numbers of multiplications. `op @vision.* at part 0` puts ops elsewhere.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from math import gcd, prod

import numpy as np

from autopar.errors import LayoutError
from autopar.ir.graph import NamedGraph
from autopar.ir.values import NamedNode, NamedTensor
from autopar.mesh import SubMesh
from autopar.sharding.assignment import Assignment, Pipelining
from autopar.sharding.bound_layout import BoundLayout
from autopar.sharding.layout.language import Layout
from autopar.sharding.layout.matching import glob_matches
from autopar.sharding.layout.source import SourceSpan, layout_error, unknown_name
from autopar.sharding.layout.syntax import (
    CutStatement,
    MicroBatches,
    OpenMicroBatches,
    PartPin,
    PipelineStatement,
    named_axes,
)
from autopar.sharding.sharding import MICRO

__all__ = [
    "PRODUCTS",
    "check_pipeline",
    "late_weights",
    "needs_micro_batches",
    "statements_of",
    "with_default_micro",
    "with_stages",
    "without_stages",
]


# Products that may put off the gradient of a weight: the places of their input, weight and bias among the operands.
PRODUCTS: dict[str, tuple[int, int, int | None]] = {
    "aten.linear.default": (0, 1, 2),
    "aten.addmm.default": (1, 2, 0),
    "aten.mm.default": (0, 1, None),
    "aten.matmul.default": (0, 1, None),
}


def needs_micro_batches(layout: Layout, axes: SubMesh) -> bool:
    """Return whether a layout has stages and names no number of micro-batches."""
    pipeline = layout.pipeline
    return layout.micro_batches is None and pipeline is not None and axes.get(pipeline.axis, 1) > 1


def with_default_micro(graph: NamedGraph, layout: Layout, axes: SubMesh) -> Layout:
    """Return the layout with a number of micro-batches where it has stages and names none.

    It is the least divisor of a rank's batch that gives each stage two micro-batches; if none does, the largest one.
    """
    pipeline, asked = layout.pipeline, layout.open_micro_batches or OpenMicroBatches()
    if pipeline is None or not needs_micro_batches(layout, axes):
        return layout
    _check_axes(layout, pipeline, axes)
    stages, bound = axes[pipeline.axis], BoundLayout(graph, layout, without_stages(layout, axes))
    rows = gcd(*(count for name in graph.inputs for count in _rows(bound, graph.tensors[name], asked.dim)))
    each = stages if pipeline.schedule == "interleaved" else 1
    counts = [one for one in asked.candidates or range(2, rows + 1) if one > 1 and rows % one == one % each == 0]
    if not counts:
        said = f"{rows} on a rank" if rows else "which no input has"
        message = (
            f"a pipeline of {stages} stages runs micro-batches, and no number of them divides '{asked.dim}', {said}"
        )
        fix = f"give a batch of {2 * stages} for each rank, or name its dim, as in 'micro {2 * stages} of images'"
        raise layout_error("E4", message, fix, asked.span or pipeline.span)
    count = min((one for one in counts if one >= 2 * stages), default=max(counts))
    return layout.with_micro_batches(MicroBatches(count, asked.dim, asked.span or pipeline.span))


def _rows(bound: BoundLayout, tensor: NamedTensor, batch: str) -> Iterator[int]:
    """Yield the sizes of the batch of an input on a rank; 1 where they differ between ranks."""
    for i, atom in enumerate(tensor.atoms):
        if atom.names[:1] == (batch,) and not (i and tensor.atoms[i - 1].names[:1] == (batch,)):
            ranks = prod(bound.axes[axis] for axis in bound.storage(tensor).stored.splits[i])
            yield 1 if atom.size % ranks else atom.size // ranks


def without_stages(layout: Layout, axes: SubMesh) -> SubMesh:
    """Return the axes that split tensors: those of the mesh but for the stages of a pipeline."""
    stages = None if layout.pipeline is None else layout.pipeline.axis
    # An axis of one rank has no stages: such a plan is that of a layout without a pipeline.
    return SubMesh.of(axes).like({axis: size for axis, size in axes.items() if axis != stages or size == 1})


def check_pipeline(layout: Layout, axes: SubMesh) -> None:
    """Raise if a pipeline does not fit the mesh or the micro-batches."""
    pipeline, cut, micro = layout.pipeline, layout.cut, layout.micro_batches
    if cut is not None and (pipeline is None or cut.axis != pipeline.axis):
        fix = f"write 'pipeline {cut.axis} 1f1b' too"
        raise layout_error("E3", f"'cut {cut.axis}' cuts no pipeline", fix, cut.span)
    if pipeline is None:
        for pin in layout.part_pins:
            raise layout_error(
                "E3", f"'at part {pin.part}' is a part of no pipeline", "write 'pipeline pp 1f1b' too", pin.span
            )
        return
    _check_axes(layout, pipeline, axes)
    stages = axes[pipeline.axis]
    if stages == 1:
        return
    if micro is None or micro.count < 2:
        message = f"a pipeline of {stages} stages runs micro-batches, and the layout has none"
        raise layout_error("E5", message, f"write 'micro {2 * stages}' too", pipeline.span)
    if pipeline.schedule == "interleaved" and micro.count % stages:
        message = f"micro {micro.count} does not interleave on {stages} stages: expected a multiple of {stages}"
        raise layout_error("E4", message, f"write 'micro {-(-micro.count // stages) * stages}'", pipeline.span)
    parts = stages * pipeline.chunks
    if cut is not None and cut.before and len(cut.before) != parts - 1:
        what = f"{stages} stages of {pipeline.chunks} parts" if pipeline.chunks > 1 else f"{stages} stages"
        message = f"{what} take {parts - 1} cuts, this line has {len(cut.before)}"
        raise layout_error("E4", message, "name what begins each part but the first", cut.span)


def _check_axes(layout: Layout, pipeline: PipelineStatement, axes: SubMesh) -> None:
    """Raise if the axis of the stages is not of the mesh, or has a second use."""
    if pipeline.axis not in axes:
        raise unknown_name("axis", pipeline.axis, axes, pipeline.span)
    for statement in layout:
        for axis, place in named_axes(statement):
            if axis == pipeline.axis:
                message = f"the axis '{axis}' has the stages of the pipeline, so it splits nothing else"
                raise layout_error("E3", message, "name another axis", place, pipeline.span)


def with_stages(
    graph: NamedGraph, layout: Layout, axes: SubMesh, found: Assignment, work: Mapping[str, float] | None = None
) -> Assignment:
    """Return the assignment with the parts of the pipeline of a layout, if it has one.

    Without `cut` the parts have about equal work: that of the ops in `work`, by default their multiplications.
    """
    pipeline = layout.pipeline
    if pipeline is None or axes[pipeline.axis] == 1:
        return found
    stages = axes[pipeline.axis]
    cutting = _Cutting(graph, found, pipeline, stages * pipeline.chunks, work)
    parts = cutting.parts(layout.cut, layout.part_pins)
    held = cutting.held(parts, stages)
    schedule, chunks, more = pipeline.schedule, pipeline.chunks, pipeline.more
    made = Pipelining(pipeline.axis, axes, schedule, chunks, more, parts, held, layout.part_pins)
    return replace(found, pipelining=made)


def statements_of(pipelining: Pipelining) -> tuple[PipelineStatement, CutStatement]:
    """Return the statements that give these stages: the cuts name modules where they can, else ops."""
    first: dict[int, str] = {}
    begins: dict[str, str] = {}
    is_pinned = {op: any(_is_of(op, pin.glob) for pin in pipelining.pinned) for op in pipelining.parts}
    # A part begins at an op that is where the cuts say, if it has one.
    for op in sorted(pipelining.parts, key=is_pinned.__getitem__):
        first.setdefault(pipelining.parts[op], op)
    for op in pipelining.parts:
        for path in _paths(op):
            begins.setdefault(path, op)
    before = []
    for part in sorted(first)[1:]:
        paths = [path for path in _paths(first[part]) if begins[path] == first[part]]
        before.append(paths[-1] if paths else first[part])
    schedule = PipelineStatement(pipelining.axis, pipelining.schedule, pipelining.chunks, pipelining.more)
    return schedule, CutStatement(pipelining.axis, tuple(before))


def late_weights(graph: NamedGraph, assignment: Assignment) -> dict[str, tuple[str, ...]]:
    """Return the operands whose gradients a product puts off under `zero_bubble`: its weight and its bias, by op.

    The weight is a matrix that is the same for all micro-batches: one that each of them gathers is reduced at once.
    """
    pipelining = assignment.pipelining
    if pipelining is None or pipelining.schedule != "zero_bubble":
        return {}
    stored, values = assignment.stored, assignment.values
    gathered = (name for name, policy in assignment.gather_policies.items() if policy.regather)
    varying = {name for name in gathered if stored[name].splits != values[name].splits}
    varying.update(graph.inputs)
    plain = {node.name for node in graph.exported.graph_module.graph.nodes if not node.kwargs}
    found: dict[str, tuple[str, ...]] = {}
    for node in graph.nodes:
        places = PRODUCTS.get(node.op) if node.node in plain else None
        if places is not None and node.name in pipelining.parts:
            x, weight, bias = (None if i is None or i >= len(node.operands) else node.operands[i] for i in places)
            trained = [name for name in (weight, bias) if name is not None and graph.tensors[name].requires_grad]
            ndims = [None if name is None else len(graph.tensors[name].shape) for name in (weight, bias)]
            is_constant = x != weight and varying.isdisjoint((weight, bias))
            if is_constant and weight in trained and ndims[0] == 2 and ndims[1] in (None, 1):
                found[node.name] = tuple(trained)
        if node.name in pipelining.parts or not varying.isdisjoint(node.operands):
            varying.update(name for name in node.outputs if name is not None)
    return found


class _Cutting:
    """Ops of the micro-batches that follow from parameters, in the order of the graph."""

    def __init__(
        self,
        graph: NamedGraph,
        assignment: Assignment,
        pipeline: PipelineStatement,
        count: int,
        work: Mapping[str, float] | None,
    ) -> None:
        self.graph = graph
        self.work = work
        self.pipeline = pipeline
        self.count = count
        self.readers: dict[str, list[NamedNode]] = {}
        self.varying = {node.name for node in graph.nodes if _varies(assignment, node)}
        learned = {tensor.name for tensor in graph.parameters}
        self.body: list[NamedNode] = []
        for node in graph.nodes:
            for name in dict.fromkeys(filter(None, node.operands)):
                self.readers.setdefault(name, []).append(node)
            if learned.intersection(filter(None, node.operands)):
                learned.update(filter(None, node.outputs))
                if node.name in self.varying:
                    self.body.append(node)

    def parts(self, cut: CutStatement | None, pins: Sequence[PartPin]) -> dict[str, int]:
        """Return the part of each op."""
        pinned = self._pinned(pins)
        starts = (
            self._even(pinned) if cut is None or not cut.before else [self._start(name, cut) for name in cut.before]
        )
        for before, after in zip([0, *starts], starts, strict=False):
            if after <= before:
                name = self.body[after].name
                message = f"the part that begins at {name} would be before or within the one before it"
                raise layout_error("E4", message, "name the parts in the order of the model", cut.span if cut else None)
        found = {node.name: sum(start <= place for start in starts) for place, node in enumerate(self.body)}
        for part, start in enumerate(starts, start=1):
            pin = pinned.get(self.body[start].name)
            if pin is not None and pin.part != part:
                message = f"{self.body[start].name} begins part {part}, and another line puts it at part {pin.part}"
                raise layout_error("E3", message, "cut before another op", cut.span if cut else None, pin.span)
        found.update((name, pin.part) for name, pin in pinned.items())
        if pinned:
            self._check_flow(found, pinned)
        return found

    def _pinned(self, pins: Sequence[PartPin]) -> dict[str, PartPin]:
        """Return the statement about the part of each op that has one."""
        found: dict[str, PartPin] = {}
        for pin in pins:
            if pin.part >= self.count:
                message = f"there is no part {pin.part}: the pipeline has {self.count}, from 0 to {self.count - 1}"
                raise layout_error("E4", message, "take one of these", pin.span)
            own = [node.name for node in self.body if _is_of(node.name, pin.glob)]
            if not own:
                raise self._unknown(pin.glob, pin.span)
            for name in own:
                other = found.setdefault(name, pin)
                if other.part != pin.part:
                    message = f"{name} cannot be at part {other.part} and at part {pin.part}"
                    raise layout_error("E2", message, "remove one of the lines", other.span, pin.span)
        return found

    def _check_flow(self, parts: Mapping[str, int], pinned: Mapping[str, PartPin]) -> None:
        """Raise where a value would flow from a part to an earlier one."""
        makers = {name: node.name for node in self.body for name in node.outputs}
        for node in self.body:
            for name in node.operands:
                maker = None if name is None else makers.get(name)
                if maker is not None and parts[maker] > parts[node.name]:
                    message = f"{maker} in part {parts[maker]} feeds {node.name} in part {parts[node.name]}"
                    # One of both has a line; the other one goes where it is.
                    move, to = (maker, node.name) if node.name in pinned else (node.name, maker)
                    fix = f"values go to later parts alone: write 'op @{move} at part {parts[to]}' too"
                    involved = (pinned[op].span for op in (maker, node.name) if op in pinned)
                    raise layout_error("E5", message, fix, *involved)

    def _start(self, name: str, cut: CutStatement) -> int:
        """Return the place of the first op of a module, or of the op that has this name or makes this value."""
        for place, node in enumerate(self.body):
            if _is_of(node.name, name) or any(glob_matches(name, own) for own in filter(None, node.outputs)):
                return place
        raise self._unknown(name, cut.span)

    def _unknown(self, name: str, span: SourceSpan | None) -> LayoutError:
        known = sorted({path for node in self.body for path in _paths(node.name)})
        return unknown_name("module or op of the micro-batches", name, known, span)

    def _even(self, pinned: Mapping[str, PartPin]) -> list[int]:
        """Return the places that begin parts, so that the largest part has as little work as possible."""
        if len(self.body) < self.count:
            message = f"the model has {len(self.body)} ops with parameters, which is too few for {self.count} parts"
            raise layout_error("E4", message, "take fewer stages", self.pipeline.span)
        each = [_work(self.graph, node) if self.work is None else self.work[node.name] for node in self.body]
        fixed = [0.0] * self.count
        for place, node in enumerate(self.body):
            if node.name in pinned:
                fixed[pinned[node.name].part] += each[place]
                each[place] = 0.0
        work = list(accumulate(each, initial=0.0))
        crossing = self._crossing()
        places = [place for place, node in enumerate(self.body) if place and node.name not in pinned]
        # A part begins at the next op that stands where the cuts say.
        between = self._between_layers()
        following = (bisect_left(places, place) for place in between if place)
        candidates = sorted({places[i] for i in following if i < len(places)})
        # Only a stage of several chunks may have one without a layer.
        if len(candidates) + 1 - (self.pipeline.chunks == 1 and between[-1] < len(self.body)) < self.count:
            for most in sorted(set(crossing[1:])):
                candidates = [place for place in places if crossing[place] <= most]
                if len(candidates) + 1 >= self.count:
                    break
        return _balanced(work, candidates, fixed)

    def _between_layers(self) -> list[int]:
        """Return the places before, between and behind the layers of the longest stack."""
        stacks = [repeat.module_paths for repeat in self.graph.repeats if len(set(repeat.module_paths)) == repeat.count]
        layers, begins, end = max(stacks, key=len, default=()), dict[str, int](), 0
        for place, node in enumerate(self.body):
            for path in set(_paths(node.name)).intersection(layers):
                begins.setdefault(path, place)
                end = place + 1
        return sorted({*begins.values(), end})

    def _crossing(self) -> list[int]:
        """Return the number of values that would cross a cut before each op."""
        places = {node.name: place for place, node in enumerate(self.body)}
        change = [0] * (len(self.body) + 1)
        for place, node in enumerate(self.body):
            for name in filter(None, node.outputs):
                last = max((places.get(each.name, 0) for each in self.readers.get(name, ())), default=0)
                if last > place:
                    change[place + 1] += 1
                    change[last + 1] -= 1
        return list(accumulate(change))[: len(self.body)]

    def held(self, parts: Mapping[str, int], stages: int) -> dict[str, int | None]:
        """Return the stage that stores each parameter: the last one that reads it; None if all do."""
        read = {each.name: self._stages_of(each.name, parts, stages) for each in self.graph.parameters}
        found: dict[str, int | None] = {}
        for joined in self._joined(parts).values():
            readers = set().union(*(read[name] for name in joined))
            # A scalar has no dim along which one stage could have all rows.
            is_whole = not readers or not all(self.graph.tensors[name].shape for name in joined)
            found.update(dict.fromkeys(joined, None if is_whole else max(readers)))
        return found

    def _joined(self, parts: Mapping[str, int]) -> dict[str, set[str]]:
        """Return, for each parameter, those that ops before the micro-batches join it with."""
        origins = {each.name: each.name for each in self.graph.parameters}
        groups = {name: {name} for name in origins}
        for node in self.graph.nodes:
            sources = [origins[name] for name in node.operands if name in origins]
            if sources and node.name not in parts:
                joined = set().union(*(groups[name] for name in sources))
                groups.update(dict.fromkeys(joined, joined))
                origins.update((name, sources[0]) for name in node.outputs if name is not None)
        return groups

    def _stages_of(self, name: str, parts: Mapping[str, int], stages: int) -> set[int]:
        """Return the stages that read a parameter."""
        found: set[int] = set()
        left, seen, once = [name], {name}, ""
        while left:
            for node in self.readers.get(left.pop(), ()):
                if node.name in parts:
                    found.add(parts[node.name] % stages)
                    continue
                once = once or node.name
                for output in filter(None, node.outputs):
                    if output not in seen:
                        seen.add(output)
                        left.append(output)
        if found and not seen.isdisjoint(self.graph.outputs):
            where = f"outside of the micro-batches, by {once}" if once else "outside of the micro-batches"
            message = f"the parameter {name} is read {where}, where all stages would add its gradient"
            fix = (
                "leave a term of the weights out of the loss, as weight_decay of the optimizer does; "
                "a model of two batches takes no pipeline"
            )
            raise layout_error("E5", message, fix, self.pipeline.span)
        return found


def _varies(assignment: Assignment, node: NamedNode) -> bool:
    """Return whether an op runs once in each micro-batch."""
    op = assignment.ops[node.name]
    shardings = (one for one in (*op.operands, *op.produced) if one is not None)
    return any(MICRO in one.axes or MICRO in one.partial for one in shardings)


def _is_of(op: str, name: str) -> bool:
    """Return whether an op has a name, or stands in a module of this path."""
    return glob_matches(name, op) or any(glob_matches(name, path) for path in _paths(op))


def _paths(op: str) -> Iterator[str]:
    """Yield the module paths that an op stands in, innermost first."""
    path = op.rpartition("/")[0]
    while path:
        yield path
        path = path.rpartition(".")[0]


def _work(graph: NamedGraph, node: NamedNode) -> float:
    """Return the multiplications of an op, or about its elements."""
    operands = [graph.tensors[name] for name in node.operands if name is not None]
    # The rows of a table are a factor of an embedding, which reads one row for each index.
    if any(not tensor.dtype.is_floating_point for tensor in operands):
        return float(max((prod(graph.tensors[name].shape) for name in node.outputs if name is not None), default=0))
    return float(prod(node.sizes.values()))


def _balanced(work: Sequence[float], candidates: Sequence[int], fixed: Sequence[float]) -> list[int]:
    """Return the candidates that begin the later parts, so that the most work of a part is least.

    A part has the work between two of them, and what is fixed.
    """
    ends = [*candidates, len(work) - 1]
    until = np.array([work[end] for end in ends])
    # sums[i, j]: work between two ends, in order.
    sums = np.where(np.tri(len(ends), dtype=bool), np.inf, until - until[:, None])
    # least[j]: largest part of the best cuts of all before ends[j]; chosen: the last of these cuts.
    least, chosen = until + fixed[0], []
    for more in fixed[1:]:
        options = np.maximum(least[:, None], sums + more)
        chosen.append(options.argmin(axis=0))
        least = options.min(axis=0)
    found, place = [], len(ends) - 1
    for best in reversed(chosen):
        place = int(best[place])
        found.append(ends[place])
    return found[::-1]
