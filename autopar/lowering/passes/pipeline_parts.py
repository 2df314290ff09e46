"""Cut the graph of one micro-batch into the parts of a pipeline.

An op that depends on parameters and on the micro-batch belongs to its part. All others, as a mask, are copied into
each part that reads them, so only values that follow from parameters cross a cut.

Input, of which op `y` begins part 1::

    x0 = micro_slice(number, x)
    y0 = linear(x0, w0)
    y = linear(y0, w1)
Output::

    part 0:  x0 = micro_slice(number, x)
             y0 = linear(x0, w0)              sent to part 1
    part 1:  y = linear(y0, w1)               of y0 as received

One stage has a parameter that several stages read. The others read it as received before the first micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from autopar.errors import LayoutError
from autopar.ir.graph import NamedGraph
from autopar.ir.values import NamedTensor
from autopar.lowering.collectives.process_groups import Groups
from autopar.lowering.collectives.stage_messages import Crossing, StageGroup
from autopar.lowering.modules.late_weights import LateProduct, LateWeights, operands_of
from autopar.lowering.modules.micro_loop import LoopResult, MicroBatchLoop, MicroBatchSlice, MicroBatchZeros
from autopar.lowering.modules.pipeline_loop import PipelineLoop
from autopar.lowering.modules.pipeline_part import PartResult, PipelinePart, TiedInput
from autopar.lowering.modules.shard_ops import RandomOp
from autopar.lowering.passes.aliases import FRESH
from autopar.lowering.passes.recompute_regions import MOVABLE
from autopar.sharding.assignment import Assignment, Pipelining
from autopar.sharding.pipelining import late_weights
from autopar.sharding.schedules import Schedule

__all__ = ["OP", "VALUE", "InputOrigin", "StageCut", "check_loops", "cut_in_parts"]

# Metadata of a node from emit: the op that it was generated for, and the tensor that it holds a shard of.
OP = "op"
VALUE = "value"


@dataclass(frozen=True)
class StageCut:
    """Pipeline of a graph, seen from one rank."""

    assignment: Assignment
    stages: StageGroup
    graph: NamedGraph
    # By node of the traced graph.
    by_node: Mapping[str, NamedTensor]

    @classmethod
    def of(
        cls, assignment: Assignment, groups: Groups, graph: NamedGraph, by_node: Mapping[str, NamedTensor]
    ) -> StageCut | None:
        """Return the pipeline of an assignment; None if it has none."""
        one = assignment.pipelining
        if one is None:
            return None
        found, ranks = groups.stages(one.axis)
        by_tag = groups.matches_by_tag(found[0])
        stages = StageGroup(found, ranks, groups.coordinate[one.axis], one.schedule, one.chunks, one.more, by_tag)
        return cls(assignment, stages, graph, by_node)

    @property
    def pipelining(self) -> Pipelining:
        assert self.assignment.pipelining is not None, "a pipeline has stages"
        return self.assignment.pipelining

    @cached_property
    def late_weights(self) -> Mapping[str, tuple[str, ...]]:
        """Products that put off the gradients of their weights, by op."""
        return late_weights(self.graph, self.assignment)

    @property
    def count(self) -> int:
        """Number of parts."""
        return self.pipelining.stages * self.pipelining.chunks

    def part_of(self, node: Node) -> int | None:
        return self.pipelining.parts.get(node.meta.get(OP, ""))

    def stage_with(self, placeholder: str) -> int | None:
        """Return the stage that stores the parameter of a placeholder; None if all stages have it."""
        tensor = self.by_node.get(placeholder)
        return None if tensor is None else self.pipelining.held.get(tensor.name)

    def is_elsewhere(self, placeholder: str) -> bool:
        """Return whether another stage stores the parameter of a placeholder."""
        return self.stage_with(placeholder) not in (None, self.stages.stage)

    def is_learned(self, placeholder: str) -> bool:
        tensor = self.by_node.get(placeholder)
        return tensor is not None and tensor.kind == "param"

    def is_shared(self, placeholder: str) -> bool:
        """Return whether all stages have a gradient of a placeholder, each a part of the sum."""
        tensor = self.by_node.get(placeholder)
        if tensor is None or not tensor.requires_grad:
            return False
        return tensor.kind == "input" or (tensor.kind == "param" and self.pipelining.held[tensor.name] is None)

    def value(self, node: Node) -> tuple[tuple[int, ...], NamedTensor]:
        """Return the local shape of a value, and its tensor."""
        return tuple(node.meta["local_shape"]), self.graph.tensors[node.meta[VALUE]]


def check_loops(graph: NamedGraph, module: nn.Module, schedule: Schedule) -> None:
    """Raise if a loop of a generated graph without stages could not run the backwards of a schedule."""
    for loop in module.modules():
        if isinstance(loop, MicroBatchLoop):
            nodes: Iterable[Node] = loop.body.graph.output_node().args[0]  # type: ignore[assignment]
            pairs = zip((graph.tensors.get(node.meta.get(VALUE, "")) for node in nodes), loop.results, strict=True)
            _check_first_backward(graph, schedule, ((one, result) for one, result in pairs if one is not None))


def _check_first_backward(
    graph: NamedGraph, schedule: Schedule, results: Iterable[tuple[NamedTensor, LoopResult]]
) -> None:
    """Raise if a loss needs a value of all micro-batches, and the first backward comes before the last forward."""
    if schedule == "gpipe" or not any(_is_loss(graph.tensors[name]) for name in graph.outputs):
        return
    for tensor, result in results:
        is_known = tensor.name in graph.outputs if result.kind == "concat" else not tensor.shape
        if tensor.requires_grad and not is_known:
            lines = [node.origin.source for node in graph.nodes if tensor.name in node.outputs and node.origin.source]
            value = f"{tensor.name} ({lines[0]})" if lines else tensor.name
            reason = f"but the loss needs {value} of all micro-batches, as the auxiliary loss of a router does"
            message = f"E5: {schedule} runs the first backward before the last forward, {reason}"
            fix = "the schedule gpipe, which runs all forwards first, or a loss without that term"
            raise LayoutError("E5", f"{message}\nfix: {fix}")


def _is_loss(tensor: NamedTensor) -> bool:
    return tensor.requires_grad and not tensor.shape


@dataclass(frozen=True)
class InputOrigin:
    """Placeholders of the whole graph that an input of the loop follows from."""

    names: frozenset[str]
    # True if it also follows from results of an earlier loop with parameters, which all stages have.
    is_result: bool


# Make the module of a part from its graph and the modules that it calls.
Finish = Callable[[Graph, dict[str, nn.Module]], GraphModule]


def cut_in_parts(
    graph: Graph,
    modules: Mapping[str, nn.Module],
    cut: StageCut,
    joins: Sequence[LoopResult],
    origins: Mapping[Node, InputOrigin],
    count: int,
    absent: int,
    finish: Finish,
) -> tuple[PipelineLoop, list[int]]:
    """Return the loop over the parts of this stage, and the places of the inputs of `graph` that it takes.

    The first placeholder of `graph` is the number of the micro-batch, `origins` has the others. `absent` is the number
    of parameters of other stages, which stand behind the inputs.
    """
    return _Cutter(graph, modules, cut, joins, origins).run(count, absent, finish)


class _Cutter:
    def __init__(
        self,
        graph: Graph,
        modules: Mapping[str, nn.Module],
        cut: StageCut,
        joins: Sequence[LoopResult],
        origins: Mapping[Node, InputOrigin],
    ) -> None:
        self.graph = graph
        self.modules = modules
        self.cut = cut
        self.joins = joins
        # Inputs that depend on parameters, those whose gradients add up over the stages, and the stages of parameters.
        self.learned = {node for node, one in origins.items() if one.is_result or any(map(cut.is_learned, one.names))}
        self.shared = {node for node, one in origins.items() if one.is_result or any(map(cut.is_shared, one.names))}
        self.source = {
            node: stage for node, one in origins.items() if (stage := self._stage_with(node, one)) is not None
        }
        self.nodes = [node for node in graph.nodes if node.op != "output"]
        self.number, *self.inputs = graph.find_nodes(op="placeholder")
        self.results: list[Node] = list(graph.output_node().args[0])  # type: ignore[arg-type]
        self.parts = self._parts(self.learned | self.shared)
        self.late = LateWeights()
        self.crossings = [one for node in self.nodes if (one := self._crossing(node)) is not None]

    def _stage_with(self, node: Node, origin: InputOrigin) -> int | None:
        """Return the stage that has an input; None if all do."""
        stages = {stage for name in origin.names if (stage := self.cut.stage_with(name)) is not None}
        assert len(stages) <= 1, f"{node} joins parameters of stages {stages}"
        if stages and node in self.shared:
            raise LayoutError(
                "E5",
                f"E5: {node} is computed before the micro-batches, from a parameter that one stage of the pipeline has "
                "and from an input with a gradient or a sum over micro-batches\n"
                "fix: compute it from values of the micro-batch, or take no pipeline",
            )
        return stages.pop() if stages else None

    def _parts(self, learned: set[Node]) -> dict[Node, int]:
        """Return the part of each node that depends on parameters and on the micro-batch."""
        found: dict[Node, int] = {}
        moving: set[Node] = set()
        for node in self.nodes:
            module = self.modules.get(str(node.target)) if node.op == "call_module" else None
            sources = node.all_input_nodes
            if isinstance(module, MicroBatchSlice | MicroBatchZeros | RandomOp) or not moving.isdisjoint(sources):
                moving.add(node)
            if not learned.isdisjoint(sources):
                learned.add(node)
                if node in moving:
                    before = [found[one] for one in sources if one in found]
                    own = self.cut.part_of(node)
                    found[node] = max([*before, own] if own is not None else before, default=0)
        return found

    def _crossing(self, node: Node) -> Crossing | None:
        """Return the value of a node if other parts read it."""
        if node not in self.parts:
            return None
        source = self.parts[node]
        targets = sorted({self.parts[user] for user in node.users if user in self.parts} - {source})
        if not targets:
            return None
        shape, tensor = self.cut.value(node)
        return Crossing(node.name, source, tuple(targets), shape, tensor.dtype, tensor.requires_grad)

    def _source(self, result: Node) -> int:
        return self.parts.get(result, self.cut.count - 1)

    def _needed(self, part: int) -> set[Node]:
        """Return the nodes of a part: its own, and all that they read up to placeholders and received values."""
        left = [node for node, own in self.parts.items() if own == part]
        left += [node for node in self.results if self._source(node) == part]
        found: set[Node] = set()
        while left:
            node = left.pop()
            if node not in found:
                found.add(node)
                if self.parts.get(node, part) == part:
                    left += node.all_input_nodes
        return found

    def run(self, count: int, absent: int, finish: Finish) -> tuple[PipelineLoop, list[int]]:
        stages = self.cut.stages
        needed = {part: self._needed(part) for part in range(self.cut.count)}
        readers = {
            node: {stages.stage_of(part) for part, nodes in needed.items() if node in nodes} for node in self.inputs
        }
        read = [
            place
            for place, node in enumerate(self.inputs)
            if (stages.stage in readers[node] and node not in self.source)
            or (readers[node] and self.source.get(node) == stages.stage)
            or node in self.shared
        ]
        places = {self.inputs[place]: number for number, place in enumerate(read)}
        shared = [places[node] for node in self.inputs if node in self.shared]
        behind = range(len(read), len(read) + absent)
        tied = self._tied(readers, places, behind.stop)
        mine = [part for part in range(self.cut.count) if stages.stage_of(part) == stages.stage]
        parts = {part: self._part(part, needed[part], places, finish) for part in mine}
        values = [self.cut.value(node)[1] for node in self.results]
        _check_first_backward(self.cut.graph, stages.schedule, zip(values, self.joins, strict=True))
        results = [self._result(node, join) for node, join in zip(self.results, self.joins, strict=True)]
        halves = any("float16" in str((*node.args, *node.kwargs.values())) for node in self.nodes)
        return PipelineLoop(
            parts, self.crossings, count, results, stages, shared, behind, tied, halves, self.late
        ), read

    def _tied(self, readers: Mapping[Node, set[int]], places: dict[Node, int], count: int) -> list[TiedInput]:
        """Return the inputs that this stage sends or receives; those received get places from `count` on."""
        found = []
        for node, source in self.source.items():
            targets = sorted(readers[node] - {source})
            if self.cut.stages.stage in targets:
                places[node] = count
                count += 1
            if targets and self.cut.stages.stage in (source, *targets):
                shape, tensor = self.cut.value(node)
                one = TiedInput(places[node], source, tuple(targets), shape, tensor.dtype, tensor.requires_grad)
                found.append(one)
        return found

    def _result(self, node: Node, join: LoopResult) -> PartResult:
        shape, tensor = self.cut.value(node)
        return PartResult(join, self._source(node), shape, tensor.dtype, tensor.requires_grad and node in self.parts)

    def _part(self, part: int, needed: set[Node], places: Mapping[Node, int], finish: Finish) -> PipelinePart:
        graph = Graph()
        copies = {self.number: graph.placeholder(self.number.name)}
        read = [node for node in self.inputs if node in needed]
        received = [one for one in self.crossings if part in one.targets]
        by_name = {node.name: node for node in self.nodes}
        for node in (*read, *(by_name[one.name] for one in received)):
            copies[node] = graph.placeholder(node.name)
            copies[node].meta[MOVABLE] = node.meta.get(MOVABLE, frozenset())
        called: dict[str, nn.Module] = {}
        for node in self.nodes:
            if node not in needed or node in copies:
                continue
            if node.op == "call_module":
                called[str(node.target)] = self.modules[str(node.target)]
            late = self._late_product(node, places)
            if late is None:
                copies[node] = graph.node_copy(node, copies.__getitem__)
            else:
                called[f"late_{node.name}"] = late
                copies[node] = copy = graph.create_node(
                    "call_module", f"late_{node.name}", map_arg(node.args, copies.__getitem__), name=node.name
                )
                copy.meta = {**node.meta, FRESH: True}
        sent = [one for one in self.crossings if one.source == part]
        results = [place for place, node in enumerate(self.results) if self._source(node) == part]
        graph.output(
            tuple(copies[node] for node in (*(by_name[one.name] for one in sent), *(self.results[i] for i in results)))
        )
        return PipelinePart(
            finish(graph, called),
            tuple(places[node] for node in read),
            tuple(received),
            tuple(sent),
            tuple(results),
        )

    def _late_product(self, node: Node, places: Mapping[Node, int]) -> LateProduct | None:
        """Return the product that puts off the gradient of its weight, if the schedule and the op allow it."""
        operands = operands_of(node) if node.meta.get(OP) in self.cut.late_weights else None
        if operands is None:
            return None
        weight, bias = operands
        return LateProduct(node.target, places[weight], None if bias is None else places[bias], self.late)
