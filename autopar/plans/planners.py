"""Who decides how a call of a parallel module runs: a layout, a plan, or a search."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any
from zlib import crc32

import torch
from torch import nn

from autopar.cost.memory.peak import check_memory
from autopar.cost.network import Network
from autopar.cost.unequal_devices import with_slowest_links
from autopar.errors import AutoparError, AutoparWarning
from autopar.ir.graph import NamedGraph
from autopar.ir.precision import Precision
from autopar.ir.values import NamedTensor
from autopar.mesh import Mesh, SubMesh
from autopar.plans.find import PlanRequest, plan_graph
from autopar.plans.header import check_model, check_whole, read_header
from autopar.plans.loss_pieces import stated_graph
from autopar.plans.retarget import retarget, retargeted
from autopar.plans.unequal import with_speeds
from autopar.sharding.assignment import Assignment
from autopar.sharding.contracts import check_contracts
from autopar.sharding.layout.fold_statement import FoldStatement
from autopar.sharding.layout.language import Layout, parse_layout
from autopar.sharding.layout.left_whole import left_whole
from autopar.sharding.layout.pieces_statement import PiecesStatement
from autopar.sharding.layout.resolve import resolve
from autopar.sharding.layout.syntax import Block, DimRule, Guard, Hole, Limit, MicroBatches, OpenMicroBatches, Pin
from autopar.sharding.level_sums import LevelSum, LevelSums
from autopar.sharding.options import Outputs, TrainingOptions
from autopar.sharding.propagation import propagate
from autopar.sharding.replicas import split_replicas
from autopar.sharding.reshard_insertion import InsertedReshard
from autopar.sharding.shares import check_whole_inputs
from autopar.sharding.time_slice import step_plan
from autopar.tracing.part_of_model import named_part, stored_dims
from autopar.tracing.trace import Exporter, named_graph

__all__ = ["LayoutPlanner", "PartPlanner", "PlanFilePlanner", "SearchPlanner", "has_holes"]

# Statements about calls of the whole model.
OF_WHOLE_CALLS = (MicroBatches, OpenMicroBatches, PiecesStatement, FoldStatement, Guard, Limit)


def has_holes(layout: Layout) -> bool:
    """Return True if a layout leaves a place open with `?`; published strategies are complete."""
    pipeline, cut = layout.pipeline, layout.cut
    if layout.open_micro_batches is not None or (pipeline is not None and pipeline.is_open):
        return True
    if cut is not None and not cut.before:
        return True
    rules: list[DimRule] = []
    for statement in layout if layout.strategy is None else ():
        if isinstance(statement, DimRule):
            rules.append(statement)
        elif isinstance(statement, Block | Pin):
            rules += statement.rules
    return any(isinstance(term, Hole) and not term.candidates for rule in rules for term in rule.place.terms)


@dataclass(frozen=True)
class LayoutPlanner:
    """Planner that completes a layout by propagation."""

    layout: Layout
    axes: SubMesh
    dims: Mapping[str, str] | None
    request: PlanRequest
    device_type: str
    # Cluster levels that the mesh gives its axes.
    links: Mapping[str, str] = field(default_factory=dict)
    # Set at the first call: later ones, of other sizes, do not warn again.
    _decided: list[Layout] = field(default_factory=list, compare=False, repr=False)

    def trace(self, model: nn.Module, inputs: tuple[Any, ...] | Mapping[str, Any], export: Exporter) -> NamedGraph:
        graph = named_graph(model, inputs, self.dims, export)
        return stated_graph(graph, self.layout, self.request.options.outputs)

    def decide(self, graph: NamedGraph) -> Assignment | str:
        layout = self.layout
        # Without a cluster, `by speed` is an error.
        if self.request.cluster is not None:
            layout = with_speeds(graph, layout, self.axes, self.request.cluster_value(), {})
        if not self._decided:
            self._decided.append(layout)
            for sentence in left_whole(graph, layout, self.axes):
                warnings.warn(sentence, AutoparWarning, stacklevel=2)
        return propagate(graph, layout, self.axes)

    def read(self, graph: NamedGraph, text: str) -> tuple[NamedGraph, Assignment]:
        raise AssertionError("a layout is completed by the first rank")

    def check(self, graph: NamedGraph, assignment: Assignment, inserted: tuple[InsertedReshard, ...]) -> None:
        check_contracts(self.layout, graph, assignment, inserted)
        plan = step_plan(graph, self.layout, assignment).with_options(self.request.options)
        check_memory(self.layout, graph, plan, self._device_bytes())

    def level_sums(self, axes: tuple[str, ...]) -> tuple[LevelSum, ...]:
        """Return the all-reduces that run by level by the prices of the cluster that the user named; else none."""
        return () if self._network is None else self._network.level_sums(axes)

    @cached_property
    def _network(self) -> Network | None:
        named = self.request.cluster is not None
        if not named:
            return None
        cluster = with_slowest_links(self.request.cluster_value(), self.axes, self.links)
        return Network(cluster, self.axes, self.links)

    def _device_bytes(self) -> float | None:
        """Return the memory of the device in bytes; None for a CPU, which the ranks of a machine share."""
        if self.device_type == "cpu":
            return None
        properties = torch.get_device_module(self.device_type).get_device_properties()
        return float(properties.total_memory)

    def whole_shapes(self, graph: NamedGraph) -> Mapping[str, tuple[int, ...]]:
        return _whole_shapes(graph, self.layout, self.axes)

    def of_parts(self, graph: NamedGraph) -> PartPlanner:
        layout = self.layout
        if self.request.cluster is not None:
            layout = with_speeds(graph, layout, self.axes, self.request.cluster_value(), {})
        return PartPlanner(_in_parts(layout), self.axes, stored_dims(graph), self)

    def facts(self) -> Mapping[str, str]:
        lines = enumerate(str(self.layout).splitlines(), start=1)
        found = {f"line {number} of the layout": line for number, line in lines}
        cluster = "none" if self._network is None else self._network.cluster
        prices = f"{getattr(cluster, 'name', cluster)} {crc32(repr(cluster).encode())}"
        return {**found, "dims": str(dict(self.dims or {})), "mesh": str(dict(self.axes)), "cluster": prices}


def _whole_shapes(graph: NamedGraph, layout: Layout, axes: SubMesh) -> dict[str, tuple[int, ...]]:
    """Return the whole shapes of inputs, given the graph of one rank's shards."""
    check_whole_inputs(layout)
    return {name: _whole_shape(graph.tensors[name], layout, axes) for name in graph.inputs}


def _whole_shape(tensor: NamedTensor, layout: Layout, axes: SubMesh) -> tuple[int, ...]:
    # Resolve the rules on a tensor that all axes divide: the sizes of the shard must not close a split.
    scale = prod(axes.values())
    atoms = tuple(atom._replace(size=atom.size * scale if atom.names else atom.size) for atom in tensor.atoms)
    sizes = [prod(atom.size for atom in atoms if atom.dim == dim) for dim in range(len(tensor.shape))]
    wanted = resolve(layout, replace(tensor, atoms=atoms, shape=tuple(sizes)), "input", axes)
    shape = list(tensor.shape)
    for atom, split in zip(atoms, wanted, strict=True):
        shape[atom.dim] *= prod(axes[axis] for axis in split or ())
    return tuple(shape)


@dataclass(frozen=True)
class PartPlanner:
    """Planner of calls of parts of a model, `module.encoder(x)`, by the layout of the whole model.

    Statements about tensors and ops that a part lacks do not count. Micro-batches, and pieces of the loss, are of calls
    of the whole model.
    """

    layout: Layout
    axes: SubMesh
    # Dims of the parameters and buffers in the graph of the whole model.
    known: Mapping[str, str]
    whole: LayoutPlanner | PlanFilePlanner

    def trace(self, model: nn.Module, inputs: tuple[Any, ...] | Mapping[str, Any], export: Exporter) -> NamedGraph:
        return named_part(model, inputs, self.known, export)

    def decide(self, graph: NamedGraph) -> Assignment | str:
        return retarget(graph, self.layout, self.axes)

    def read(self, graph: NamedGraph, text: str) -> tuple[NamedGraph, Assignment]:
        raise AssertionError("a layout is completed by the first rank")

    def check(self, graph: NamedGraph, assignment: Assignment, inserted: tuple[InsertedReshard, ...]) -> None:
        """Check nothing: guards and limits of a layout speak of the whole model."""

    def whole_shapes(self, graph: NamedGraph) -> Mapping[str, tuple[int, ...]]:
        return _whole_shapes(graph, self.layout, self.axes)

    def level_sums(self, axes: tuple[str, ...]) -> Iterable[LevelSum]:
        return self.whole.level_sums(axes)

    def facts(self) -> Mapping[str, str]:
        return self.whole.facts()

    def of_parts(self, graph: NamedGraph) -> PartPlanner:
        return self


def _in_parts(layout: Layout) -> Layout:
    """Return the statements of a layout that hold for calls of parts of the model."""
    if layout.pipeline is not None:
        raise AutoparError(
            "a part of a module with stages cannot be called: its layers are on different ranks\n"
            "fix: call the whole module; or use a layout without a pipeline"
        )
    if layout.capacity is not None:
        raise AutoparError(
            "a part of a module under 'capacity' cannot be called: it would keep the rows that the whole model drops\n"
            "fix: call the whole module; or use a layout without a capacity"
        )
    kept = (one for one in layout.statements if not isinstance(one, OF_WHOLE_CALLS))
    return replace(layout, statements=tuple(kept))


@dataclass
class PlanFilePlanner:
    """Planner that reads the text of a plan; inputs of other sizes are retargeted."""

    text: str
    name: str
    # That of the text, with the axes of replicas; the plan is that of one replica.
    mesh: Mesh
    dims: Mapping[str, str] | None
    outputs: Outputs = "sharded"
    by_level: LevelSums = field(default_factory=LevelSums, init=False)
    # Set on the rank that decides, until its first call is read: later ones, of other sizes, do not warn.
    warns: bool | None = field(default=None, init=False)

    @property
    def precision(self) -> Precision:
        """Return the precision that the plan was made for."""
        return self._options.precision

    @property
    def offload_states(self) -> bool:
        """Return whether the plan has the states of the optimizer on the host."""
        return self._options.offload_states

    @property
    def _options(self) -> TrainingOptions:
        header = read_header(self.text, self.name)
        assert header is not None, "only plans come here"
        return header.options

    def _layout(self) -> tuple[Layout, SubMesh]:
        """Return the layout of one replica, and its axes."""
        layout, drift = split_replicas(parse_layout(self.text, self.name), self.mesh)
        return layout, (self.mesh if drift is None else drift.replica_mesh).whole

    def trace(self, model: nn.Module, inputs: tuple[Any, ...] | Mapping[str, Any], export: Exporter) -> NamedGraph:
        return stated_graph(named_graph(model, inputs, self.dims, export), self._layout()[0], self.outputs)

    def level_sums(self, axes: tuple[str, ...]) -> tuple[LevelSum, ...]:
        return self.by_level.over(axes)

    def decide(self, graph: NamedGraph) -> Assignment | str:
        self.warns = self.warns is None
        return self.text

    def read(self, graph: NamedGraph, text: str) -> tuple[NamedGraph, Assignment]:
        self.text = text
        # All ranks read the text of the first rank, so all complete the same plan.
        header = read_header(text, self.name)
        assert header is not None, "only plans come here"
        check_model(header, graph, self.name)
        self.by_level = header.by_level
        check_whole(header, len(parse_layout(text, self.name).statements), self.name)
        layout, axes = self._layout()
        graph = stated_graph(graph, layout, self.outputs)
        if header.graph == graph.fingerprint:
            return graph, propagate(graph, layout, axes)
        found = retargeted(graph, layout, axes)
        for sentence in found.lost if self.warns else ():
            warnings.warn(sentence, AutoparWarning, stacklevel=2)
        return graph, found.assignment

    def check(self, graph: NamedGraph, assignment: Assignment, inserted: tuple[InsertedReshard, ...]) -> None:
        """Check the guards of the plan itself."""
        check_contracts(self._layout()[0], graph, assignment, inserted)

    def whole_shapes(self, graph: NamedGraph) -> Mapping[str, tuple[int, ...]]:
        text, sizes = self._layout()
        layout = retarget(graph, text, sizes)
        check_whole_inputs(text)
        found = {}
        for name in graph.inputs:
            shape = list(graph.tensors[name].shape)
            for atom, axes in zip(graph.tensors[name].atoms, layout.stored[name].splits, strict=True):
                shape[atom.dim] *= prod(sizes[axis] for axis in axes)
            found[name] = tuple(shape)
        return found

    def facts(self) -> Mapping[str, str]:
        lines = enumerate(self.text.splitlines(), start=1)
        found = {f"line {number} of the plan": line for number, line in lines}
        return {**found, "dims": str(dict(self.dims or {})), "mesh": str(dict(self.mesh.whole))}

    def of_parts(self, graph: NamedGraph) -> PartPlanner:
        layout, axes = self._layout()
        return PartPlanner(_in_parts(layout), axes, stored_dims(graph), self)


@dataclass
class SearchPlanner:
    """Planner that searches a plan at the first call and retargets it for later ones.

    `searched` is the text of a plan that was found before the first call.
    """

    layout: Layout | None
    mesh: Mesh
    dims: Mapping[str, str] | None
    request: PlanRequest
    searched: str | None = None
    found: PlanFilePlanner | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.searched is not None:
            self.found = self._reading(self.searched)

    def _reading(self, text: str) -> PlanFilePlanner:
        found = PlanFilePlanner(text, "<plan>", self.mesh, self.dims, self.request.options.outputs)
        found.warns = False  # the plan was made for the first call
        return found

    def trace(self, model: nn.Module, inputs: tuple[Any, ...] | Mapping[str, Any], export: Exporter) -> NamedGraph:
        return named_graph(model, inputs, self.dims, export)

    def decide(self, graph: NamedGraph) -> Assignment | str:
        if self.found is not None:
            return self.found.decide(graph)
        return plan_graph(graph, (self.mesh,), self.layout, self.request).text

    def level_sums(self, axes: tuple[str, ...]) -> tuple[LevelSum, ...]:
        return () if self.found is None else self.found.level_sums(axes)

    def read(self, graph: NamedGraph, text: str) -> tuple[NamedGraph, Assignment]:
        if self.found is None:
            self.found = self._reading(text)
        return self.found.read(graph, text)

    def check(self, graph: NamedGraph, assignment: Assignment, inserted: tuple[InsertedReshard, ...]) -> None:
        if self.layout is not None:
            check_contracts(self.layout, graph, assignment, inserted)

    def whole_shapes(self, graph: NamedGraph) -> Mapping[str, tuple[int, ...]]:
        if self.found is not None:
            return self.found.whole_shapes(graph)
        raise AutoparError(
            "local_inputs=True needs a plan: the shardings of the inputs are unknown before planning\n"
            "fix: plan = autopar.plan(model, mesh, whole_inputs, local_inputs=True), then parallelize(..., layout=plan)"
        )

    def of_parts(self, graph: NamedGraph) -> PartPlanner:
        assert self.found is not None, "the whole model has a plan"
        return self.found.of_parts(graph)

    def facts(self) -> Mapping[str, str]:
        found = {"layout": str(self.layout), "request": str(self.request)}
        return {**found, "dims": str(dict(self.dims or {})), "mesh": str(self.mesh)}
