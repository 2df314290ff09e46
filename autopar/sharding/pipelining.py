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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import gcd, prod

from autopar.ir.graph import NamedGraph
from autopar.ir.values import NamedTensor
from autopar.mesh import SubMesh
from autopar.sharding.assignment import Assignment, Pipelining
from autopar.sharding.bound_layout import BoundLayout
from autopar.sharding.layout.language import Layout
from autopar.sharding.layout.source import layout_error, unknown_name
from autopar.sharding.layout.syntax import (
    CutStatement,
    MicroBatches,
    OpenMicroBatches,
    PipelineStatement,
    named_axes,
)
from autopar.sharding.stage_cuts import StageCuts, is_of, paths_of

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
    parts = 2 if asked.halves else 1
    numbers = asked.candidates or range(2, rows + 1)
    counts = [one for one in numbers if one > 1 and rows % (parts * one) == one % each == 0]
    if not counts:
        said = f"{rows} on a rank" if rows else "which no input has"
        message = (
            f"a pipeline of {stages} stages runs micro-batches, and no number of them divides '{asked.dim}', {said}"
        )
        fix = f"give a batch of {2 * stages} for each rank, or name its dim, as in 'micro {2 * stages} of images'"
        raise layout_error("E4", message, fix, asked.span or pipeline.span)
    count = min((one for one in counts if one >= 2 * stages), default=max(counts))
    return layout.with_micro_batches(MicroBatches(count, asked.dim, asked.halves, asked.span or pipeline.span))


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
    graph: NamedGraph,
    layout: Layout,
    axes: SubMesh,
    found: Assignment,
    work: Mapping[str, float] | None = None,
    slowness: Sequence[float] = (),
) -> Assignment:
    """Return the assignment with the parts of the pipeline of a layout, if it has one.

    Without `cut` the parts take about equal time: the work of the ops in `work`, by default their multiplications,
    times the slowness of the stage.
    """
    pipeline = layout.pipeline
    if pipeline is None or axes[pipeline.axis] == 1:
        return found
    stages = axes[pipeline.axis]
    slow = [slowness[part % stages] if slowness else 1.0 for part in range(stages * pipeline.chunks)]
    cutting = StageCuts(graph, found, pipeline, slow, work)
    parts = cutting.parts(layout.cut, layout.part_pins)
    held = cutting.held(parts, stages)
    schedule, chunks, more = pipeline.schedule, pipeline.chunks, pipeline.more
    made = Pipelining(pipeline.axis, axes, schedule, chunks, more, parts, held, layout.part_pins)
    return replace(found, pipelining=made)


def statements_of(pipelining: Pipelining) -> tuple[PipelineStatement, CutStatement]:
    """Return the statements that give these stages: the cuts name modules where they can, else ops."""
    first: dict[int, str] = {}
    begins: dict[str, str] = {}
    is_pinned = {op: any(is_of(op, pin.glob) for pin in pipelining.pinned) for op in pipelining.parts}
    # A part begins at an op that is where the cuts say, if it has one.
    for op in sorted(pipelining.parts, key=is_pinned.__getitem__):
        first.setdefault(pipelining.parts[op], op)
    for op in pipelining.parts:
        for path in paths_of(op):
            begins.setdefault(path, op)
    before = []
    for part in sorted(first)[1:]:
        paths = [path for path in paths_of(first[part]) if begins[path] == first[part]]
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
            is_real = weight in trained and not graph.tensors[weight].dtype.is_complex
            if is_constant and is_real and ndims[0] == 2 and ndims[1] in (None, 1):
                found[node.name] = tuple(trained)
        if node.name in pipelining.parts or not varying.isdisjoint(node.operands):
            varying.update(name for name in node.outputs if name is not None)
    return found
