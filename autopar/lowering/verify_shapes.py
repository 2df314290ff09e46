"""Run a generated graph on fake tensors, and compare each local shape with the sharding of its value."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import checkpoint

from autopar.ir.graph import NamedGraph
from autopar.lowering.collectives.local_reshard import LocalReshard
from autopar.lowering.modules.bucket_ends import BucketEnd, BucketStart
from autopar.lowering.modules.halves import HalvesResult, ReshardEnd
from autopar.lowering.modules.host_copies import OffloadedOps
from autopar.lowering.modules.late_weights import LateProduct
from autopar.lowering.modules.micro_loop import DividedFromLoop, MicroBatchLoop, MicroBatchSlice, MicroBatchZeros
from autopar.lowering.modules.pipeline_loop import PipelineLoop
from autopar.lowering.modules.selective_recompute import SelectiveRecompute
from autopar.lowering.modules.shard_ops import ReshardModule
from autopar.lowering.passes.join_small_sums import JoinedSums
from autopar.sharding.assignment import Assignment
from autopar.sharding.reshard_insertion import ReshardPlan
from autopar.sharding.sharding import atoms_of

__all__ = ["SHARD", "wrong_shapes"]

# Metadata of a node from emit: the tensor that it holds a shard of, and the sharding.
SHARD = "shard"

# Shapes that depend on data are taken from the sharding.
_OPEN = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
    NotImplementedError,
)


def wrong_shapes(
    graph: NamedGraph,
    assignment: Assignment,
    coordinate: Mapping[str, int],
    reshard_plan: ReshardPlan,
    module: GraphModule,
) -> Iterator[str]:
    """Yield the nodes whose local shape is not that of their sharding on the rank at a coordinate."""
    with FakeTensorMode(), torch.no_grad():
        run = _ShapeRun(graph, assignment, coordinate)
        run.graph_of(module, [run.input_of(node, reshard_plan) for node in module.graph.find_nodes(op="placeholder")])
    yield from run.wrong


class _ShapeRun:
    """The values of a generated graph as fake tensors; None where a value's shape is not known."""

    def __init__(self, graph: NamedGraph, assignment: Assignment, coordinate: Mapping[str, int]) -> None:
        self.graph = graph
        self.assignment = assignment
        self.coordinate = coordinate
        self.by_node = {tensor.node: tensor for tensor in graph.tensors.values()}
        self.known: dict[Any, Any] = {}
        self.wrong: list[str] = []

    def shard(self, name: str, sharding: Any) -> Tensor:
        tensor = self.graph.tensors[name]
        atoms = atoms_of(tensor)
        shape = atoms.fold(sharding.local_sizes(atoms, self.assignment.axes, self.coordinate))
        return torch.empty(shape, dtype=tensor.dtype)

    def input_of(self, node: Node, reshard_plan: ReshardPlan) -> Tensor | None:
        """Return the shard that a placeholder stands for; None for a random key and for early sums."""
        tensor = self.by_node.get(str(node.target))
        if tensor is None:
            return None
        whole = reshard_plan.inputs.get(tensor.name)
        return self.shard(tensor.name, self.assignment.stored[tensor.name] if whole is None else whole.reshard.source)

    def graph_of(self, module: GraphModule, inputs: list[Any]) -> Any:
        """Run a graph or the body of a region, and return its results."""
        values: dict[Node, Any] = {}
        given = iter(inputs)
        for node in module.graph.nodes:
            if node.op == "output":
                return torch.fx.node.map_arg(node.args[0], values.get)
            declared = self.shard(*node.meta[SHARD]) if SHARD in node.meta else None
            found = next(given) if node.op == "placeholder" else self._value(node, module, values)
            if isinstance(found, Tensor) and declared is not None and found.shape != declared.shape:
                name, sharding = node.meta[SHARD]
                shapes = f"has the local shape {list(found.shape)}, expected {list(declared.shape)}"
                self.wrong.append(f"{node.name}, {name} as {sharding}, {shapes}")
                found = declared
            values[node] = declared if found is None else found
        raise AssertionError("a graph ends with its output")

    def _value(self, node: Node, module: GraphModule, values: Mapping[Node, Any]) -> Any:
        if node.op == "call_module":
            return self._module(node, module.get_submodule(str(node.target)), values)
        if node.op != "call_function":
            return None
        if node.target is operator.getitem:
            source, place = node.args
            found = values.get(source)  # type: ignore[arg-type]
            return found[place] if isinstance(found, tuple | list) else None  # type: ignore[index]
        if node.target is checkpoint:
            region, *rest = node.args
            body = module.get_submodule(str(region.target))  # type: ignore[union-attr]
            assert isinstance(body, GraphModule), node
            return self.graph_of(body, [values.get(one) for one in rest])  # type: ignore[arg-type]
        return self._op(node, values)

    def _op(self, node: Node, values: Mapping[Node, Any]) -> Any:
        """Run an op of torch once for each set of shapes."""
        if any(values.get(one) is None for one in node.all_input_nodes):
            return None
        # This machine may lack the device; all shapes are found on one.
        rest = {name: value for name, value in node.kwargs.items() if name != "device"}
        args, kwargs = torch.fx.node.map_arg((node.args, rest), values.__getitem__)
        key = node.target, _key(args), _key(kwargs)
        if key not in self.known:
            try:
                self.known[key] = node.target(*args, **kwargs)  # type: ignore[operator]
            except _OPEN:
                self.known[key] = None
            except Exception as error:  # noqa: BLE001  # ops refuse wrong shapes in many ways
                self.known[key] = None
                self.wrong.append(f"{node.name} does not run on its local shapes: {error}")
        return self.known[key]

    def _module(self, node: Node, module: Any, values: Mapping[Node, Any]) -> Any:
        given = _read(node.args, values)
        if isinstance(module, MicroBatchLoop | PipelineLoop):
            for bucket in module.buckets.every:
                stored = [given[place] for place in bucket.places]
                found = self._reshards(node, bucket.state.bucket.conversions, stored)
                for place, value in zip(bucket.places, found, strict=True):
                    given[place] = value
        if isinstance(module, SelectiveRecompute | OffloadedOps):
            return self.graph_of(module.body, given)
        if isinstance(module, MicroBatchLoop):
            parts = self.graph_of(module.body, [0, *given])
            pairs = zip(module.results, parts, strict=True)
            return [None if part is None else one.join([one.part(part)] * module.count) for one, part in pairs]
        if isinstance(module, PipelineLoop):
            tied = [one for one in module.tied if one.source != module.stages.stage]
            given = [*given, *(torch.empty(one.shape, dtype=one.dtype) for one in tied)]
            for part in module.parts.values():
                received = [torch.empty(one.shape, dtype=one.dtype) for one in part.received]
                self.graph_of(part.body, [0, *(given[place] for place in part.inputs), *received])
            return [torch.empty(one.joined_shape, dtype=one.dtype) for one in module.results]
        if isinstance(module, LateProduct):
            operands = [one for one in given if isinstance(one, Tensor)]
            return module(*given) if len(operands) == len(node.all_input_nodes) else None
        if isinstance(module, MicroBatchSlice | MicroBatchZeros):
            return None if given[1] is None else module(0, given[1])
        if isinstance(module, ReshardModule):
            (found,) = self._reshards(node, (module.conversion,), given[:1])
            return found
        if isinstance(module, ReshardEnd | DividedFromLoop):
            return given[0]
        if isinstance(module, HalvesResult):
            return None if any(one is None for one in given) else module(*given)
        if isinstance(module, JoinedSums):
            return self._reshards(node, module.conversions, given)
        if isinstance(module, BucketStart):
            return given
        if isinstance(module, BucketEnd):
            (parts,) = given
            return self._reshards(node, module.running.bucket.conversions, parts)
        return None

    def _reshards(self, node: Node, reshards: tuple[LocalReshard, ...], given: list[Any]) -> list[Any]:
        found: list[Any] = []
        for one, value in zip(reshards, given, strict=True):
            if value is not None and tuple(value.shape) != one.shape:
                self.wrong.append(f"{node.name} takes the local shape {list(value.shape)}, expected {list(one.shape)}")
            found.append(None if value is None else value.new_empty(one.result_shape))
        return found


def _read(args: Any, values: Mapping[Node, Any]) -> Any:
    """Return the arguments with the value of each node; a node may stand twice."""
    if isinstance(args, Node):
        return values.get(args)
    return [_read(one, values) for one in args] if isinstance(args, list | tuple) else args


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, Mapping):
        return tuple((name, _key(item)) for name, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_key, value))
    return value.__class__, value
