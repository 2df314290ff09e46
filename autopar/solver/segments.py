"""Segments of a model: its layers, and what stands before, between and behind them; the costs of each.

The costs are those of a short graph, in which each stack has few layers, by the simulation that prices whole plans. A
stage of a pipeline is a run of segments of the whole model: its times and its stored and saved bytes add up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.cost.evaluate import part_times
from autopar.cost.hardware.cluster import Cluster
from autopar.cost.lowered_step import lower_step
from autopar.cost.memory.peak import MemoryCosts, memory
from autopar.cost.pipeline import PartTimes, sent_bytes
from autopar.cost.profile import profile_parts
from autopar.ir.analysis.op_memory import Footprint
from autopar.ir.graph import NamedGraph
from autopar.ir.short_graph import ShortGraph
from autopar.mesh import SubMesh
from autopar.sharding.assignment import Assignment, Pipelining, StepPlan
from autopar.sharding.layout.syntax import MicroBatches, PipelineStatement, Recompute
from autopar.sharding.schedules import orders
from autopar.sharding.stage_cuts import StageCuts, paths_of
from autopar.sharding.time_slice import slice_in_time, time_assignment
from autopar.solver import Floats
from autopar.solver.model.recompute_variables import STATES

__all__ = [
    "STAGES",
    "ModelCosts",
    "SegmentCosts",
    "least_sent_bytes",
    "model_costs",
    "segments_of",
    "spread",
    "stages_of",
]

# Axis of the stages in meshes that the search proposes.
STAGES = "pp"

# Numbers of a segment: what grows with the rows, beside a part that does not; seconds beside which messages of
# parameters are sent; bytes of activations; and what all micro-batches share.
GROWING = "forward", "backward", "late", "transient_bytes"
ROOMS = "forward_room", "backward_room", "late_room"
ACTIVATIONS = "saved_bytes", "sent_bytes"
ONCE = "gathers", "reductions", "last", "gradient_bytes", "results_bytes"


@dataclass(frozen=True)
class SegmentCosts:
    """Costs of one segment, in one recompute mode of its layer."""

    times: PartTimes
    # Activations of one micro-batch that later segments read.
    sent_bytes: float
    # Parameters, copies of them and optimizer states; gradients.
    stored_bytes: float
    gradient_bytes: float
    # Saved by one micro-batch.
    saved_bytes: float
    # Results of all micro-batches, which last until the end of the call.
    results_bytes: float
    # Most bytes beyond all of these while it runs.
    transient_bytes: float


@dataclass(frozen=True, eq=False)
class ModelCosts:
    """Costs of the segments of a whole model under one plan of its short graph."""

    plan: StepPlan
    # By recompute mode, then by segment of the short graph.
    by_mode: Mapping[Recompute, tuple[SegmentCosts, ...]]
    # Segments of the whole model: the one of the short graph that stands for each, and the path of its layer.
    sequence: tuple[int, ...]
    layers: tuple[str, ...]
    inputs_bytes: float
    # Costs in all modes, where these are in the first mode alone: of the same plan on other ranks that split the batch.
    like: ModelCosts | None = None
    # Memory of ops, which the same plan has on other ranks that split the batch, and in other modes.
    footprints: dict[Any, Footprint] = field(default_factory=dict)
    _columns: dict[str, Floats] = field(default_factory=dict)

    def column(self, name: str) -> Floats:
        """Return a number of each segment of the whole model, a row for each recompute mode."""
        if name not in self._columns:
            own = np.array([[_number(one, name) for one in costs] for costs in self.by_mode.values()])
            found = own[:, list(self.sequence)]
            if self.like is not None:
                # Ranks that split the batch change what is stored and sent, which all modes share.
                known = self.like.column(name)
                found = np.maximum(0.0, known + (found - known[:1]))
            self._columns[name] = found
        return self._columns[name]

    def on_more_rows(self, factor: float, fewer: ModelCosts, share: float, slack: float) -> ModelCosts:
        """Return the least costs to expect on `factor` times the rows, but for what all micro-batches share.

        What grows does so by a share of its growth from that on `fewer` rows. `slack` is a factor of all costs.
        """
        found = replace(self, _columns={name: np.zeros_like(self.column(name)) for name in ONCE})
        found._columns.update((name, slack * factor * self.column(name)) for name in ACTIVATIONS)
        found._columns.update((name, factor * self.column(name)) for name in ROOMS)
        for name in GROWING:
            own = self.column(name)
            found._columns[name] = slack * (own + share * np.maximum(0.0, own - fewer.column(name)))
        return found

    @cached_property
    def seconds(self) -> Floats:
        """Return forward and backward of one micro-batch."""
        return self.column("forward") + self.column("backward")

    @cached_property
    def is_layer(self) -> NDArray[np.bool_]:
        return np.array([bool(path) for path in self.layers])


def _number(costs: SegmentCosts, name: str) -> float:
    owner = next(one for one in (costs, costs.times, costs.times.traffic) if hasattr(one, name))
    found: float = getattr(owner, name)
    return found


def segments_of(graph: NamedGraph, micro: MicroBatches) -> list[tuple[str, tuple[str, ...]]]:
    """Return the segments in order: the path of its layer or nothing, and its ops of the micro-batches."""
    cuts = StageCuts(graph, time_assignment(graph, micro), PipelineStatement(STAGES, "1f1b"), (1.0,), None)
    places = [place for place in cuts.between_layers() if 0 < place < len(cuts.body)]
    known = graph.ops_of_layers.keys()
    found = []
    for first, last in zip([0, *places], [*places, len(cuts.body)], strict=True):
        ops = tuple(node.name for node in cuts.body[first:last])
        found.append((next((path for path in paths_of(ops[0]) if path in known), ""), ops))
    return found


def least_sent_bytes(short: ShortGraph, micro: MicroBatches, ranks: int) -> float:
    """Return the least bytes of a micro-batch that a rank sends on behind any segment, if all ranks share them."""
    tensors = slice_in_time(short.graph, micro).tensors
    every = segments_of(short.graph, micro)
    segment = {op: number for number, (_, ops) in enumerate(every) for op in ops}
    read: dict[str, int] = {}
    for node in short.graph.nodes:
        for name in filter(None, node.operands if node.name in segment else ()):
            read[name] = max(read.get(name, 0), segment[node.name])
    sent = [0.0] * (len(every) - 1)
    for node in short.graph.nodes:
        for name in filter(None, node.outputs if node.name in segment else ()):
            for behind in range(segment[node.name], read.get(name, 0)):
                sent[behind] += prod(tensors[name].shape) * tensors[name].element_bytes
    return min(sent, default=0.0) / ranks


def staged(
    graph: NamedGraph,
    micro: MicroBatches,
    axes: SubMesh,
    parts: Mapping[str, int],
    statement: PipelineStatement,
    count: int,
) -> Pipelining:
    """Return the stages that run these parts; `axes` are those of each stage."""
    cuts = StageCuts(graph, time_assignment(graph, micro), statement, (1.0,) * (count * statement.chunks), None)
    mesh = SubMesh({statement.axis: count, **axes})
    held = cuts.held(parts, count)
    return Pipelining(statement.axis, mesh, statement.schedule, statement.chunks, statement.more, parts, held)


def stages_of(
    short: ShortGraph, micro: MicroBatches, axes: SubMesh, every: Sequence[tuple[str, tuple[str, ...]]]
) -> Pipelining:
    """Return the segments of a short graph as stages; a model of which no stage can be made raises."""
    parts = {op: number for number, (_, ops) in enumerate(every) for op in ops}
    return staged(short.graph, micro, axes, parts, PipelineStatement(STAGES, "1f1b"), len(every))


def model_costs(
    short: ShortGraph,
    plan: StepPlan,
    cluster: Cluster,
    micro: MicroBatches,
    modes: Sequence[Recompute] = STATES[:-1],
    like: ModelCosts | None = None,
    begun: ModelCosts | None = None,
) -> ModelCosts:
    """Return the costs of all segments under a plan of the short graph, with its layers in each recompute mode.

    `micro` tells which ops run in each micro-batch, for a plan that has one alone. `like` has the costs of the plan on
    as many rows, and other ranks that split the batch: the first mode alone is priced then. `begun` has those of the
    first modes. Equal layers are priced once.
    """
    every = segments_of(short.graph, micro)
    assignment = replace(plan.assignment, pipelining=stages_of(short, micro, plan.axes, every))
    same = _equal_segments(short, assignment, every)
    by_mode: dict[Recompute, tuple[SegmentCosts, ...]] = {} if begun is None else dict(begun.by_mode)
    inputs, near = 0.0 if begun is None else begun.inputs_bytes, begun or like
    footprints = {} if near is None else near.footprints
    whole = lower_step(short.graph, replace(plan, assignment=replace(assignment, recompute={})))
    # Memory of one micro-batch alone: those in flight are added for each schedule.
    whole.__dict__["tasks"] = orders(len(every), 1, "gpipe")
    for mode in modes if like is None else modes[:1]:
        if mode in by_mode:
            continue
        step = whole.recomputing({} if mode == "none" else dict.fromkeys(short.graph.ops_of_layers, mode))
        # All modes run the same ops.
        step.__dict__["footprints"] = footprints
        sent, _ = sent_bytes(step, len(every))
        # What recomputes nothing costs the same in all modes.
        priced = [one for one in dict.fromkeys(same) if mode == "none" or every[one][0]]
        found = {one: by_mode["none"][one] for one in same if one not in priced}
        held = {number: memory(step.at(number)) for number in priced}
        inputs = inputs or (held.get(0) or memory(step.at(0))).inputs_bytes
        for number, tasks in zip(priced, profile_parts(step, cluster, priced), strict=True):
            found[number] = _segment_costs(held[number], part_times(tasks, step, cluster), sent[number])
        by_mode[mode] = tuple(found[number] for number in same)
    sequence, layers = list[int](), list[str]()
    for number, (path, _) in enumerate(every):
        # The layers that this one stands for, in the order of the model.
        own = [whole for whole, its in short.layers.items() if its == path] if path else [""]
        sequence += [number] * len(own)
        layers += own
    return ModelCosts(plan, by_mode, tuple(sequence), tuple(layers), inputs, like, footprints)


def _equal_segments(
    short: ShortGraph, assignment: Assignment, every: Sequence[tuple[str, tuple[str, ...]]]
) -> tuple[int, ...]:
    """Return for each segment one that costs the same: layers of a stack with equal shardings share one of them.

    The buckets in which they send their parameters may differ a little.
    """
    nodes = {node.name: node for node in short.graph.nodes}
    values, stored, policies = assignment.values, assignment.stored, assignment.gather_policies

    def key(op: str) -> object:
        node = nodes[op]
        read = tuple((values.get(name), stored.get(name), policies.get(name)) for name in node.operands if name)
        kept = tuple(values.get(name) for name in node.outputs if name)
        return id(short.graph.footprints[node.node]), node.op, assignment.ops[op], read, kept

    numbers: dict[object, list[int]] = {}
    for number, (path, ops) in enumerate(every):
        numbers.setdefault(tuple(map(key, ops)) if path else number, []).append(number)
    found = {}
    for equal in numbers.values():
        # The layer that stands for most of them.
        most = max(equal, key=lambda number: short.counts.get(every[number][0], 1))
        found.update(dict.fromkeys(equal, most))
    return tuple(found[number] for number in range(len(every)))


def _segment_costs(held: MemoryCosts, times: PartTimes, sent: float) -> SegmentCosts:
    stored = held.parameters_bytes + held.copies_bytes + held.optimizer_bytes
    rest = held.peak_bytes - stored - held.inputs_bytes - held.saved_bytes - held.gradients_bytes
    saved, results = held.saved_bytes - held.results_bytes, held.results_bytes
    return SegmentCosts(times, sent, stored, held.gradients_bytes, saved, results, max(0.0, rest))


def spread(short: ShortGraph, plan: StepPlan) -> StepPlan:
    """Return the plan of the whole graph in which each layer has the shardings of the one that stands for it."""
    given = plan.assignment
    made = replace(
        given,
        stored={name: given.stored[its] for name, its in short.tensors.items() if its in given.stored},
        values={name: given.values[its] for name, its in short.tensors.items() if its in given.values},
        ops={name: given.ops[its] for name, its in short.ops.items()},
        gather_policies={
            name: given.gather_policies[its] for name, its in short.tensors.items() if its in given.gather_policies
        },
        recompute={path: given.recompute[its] for path, its in short.layers.items() if its in given.recompute},
    )
    return replace(plan, graph=short.whole.fingerprint, assignment=made)


def with_equal_layers(short: ShortGraph, plan: StepPlan) -> StepPlan:
    """Return the plan in which all layers of a stack have the shardings of the one that stands for most of them."""
    given, twins = plan.assignment, short.twins
    made = replace(
        given,
        stored={name: given.stored[twins.get(name, name)] for name in given.stored},
        values={name: given.values[twins.get(name, name)] for name in given.values},
        ops={name: given.ops[twins.get(name, name)] for name in given.ops},
        gather_policies={name: given.gather_policies[twins.get(name, name)] for name in given.gather_policies},
    )
    return replace(plan, assignment=made)


def on_axes(plan: StepPlan, axes: Mapping[str, int], micro: MicroBatches | None) -> StepPlan:
    """Return the same assignment on axes of other sizes."""
    halves = micro is not None and micro.halves
    return replace(plan, assignment=replace(plan.assignment, axes=SubMesh(axes), halves=halves), micro=micro)


def layer_modes(layers: Sequence[str], modes: Sequence[int]) -> dict[str, Recompute]:
    """Return the recompute mode of each layer that recomputes something."""
    return {path: STATES[mode] for path, mode in zip(layers, modes, strict=True) if path and mode}
