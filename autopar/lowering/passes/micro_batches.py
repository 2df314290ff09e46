"""Collect the ops that depend on the micro-batch into loops.

Marks stand where a value enters the micro-batches (a slice) and where it leaves them (a sum, or all parts together).
Ops that depend on a slice run in a loop; all others, such as gathers of parameters, run once. A loop that needs a sum
of an earlier one, as the number of targets, computes again what it shares with that loop.

Input::

    w = all_gather(w_shard)
    x0 = micro_slice(x)
    y = linear(x0, w)
    total = micro_sum(y)
    loss = all_reduce(total)
Output::

    w = all_gather(w_shard)
    (total,) = micro_loop(x, w)
    loss = all_reduce(total)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from torch import nn
from torch.fx import Graph, GraphModule, Node

from autopar.errors import LayoutError
from autopar.ir.fx_graphs import is_random
from autopar.ir.values import NamedNode
from autopar.lowering.modules.micro_loop import (
    LoopResult,
    MicroBatchKey,
    MicroBatchLoop,
    MicroBatchSlice,
    MicroBatchZeros,
)
from autopar.lowering.modules.shard_ops import RandomOp, ReshardModule
from autopar.lowering.passes.pipeline_parts import VALUE, InputOrigin, StageCut, cut_in_parts
from autopar.mesh import SubMesh
from autopar.sharding.layout.source import layout_error
from autopar.sharding.layout.syntax import MicroBatches, print_statement
from autopar.sharding.reshard_insertion import InsertedReshard
from autopar.sharding.sharding import MICRO, Atoms, State, place_in_time

__all__ = [
    "MicroBatchEnd",
    "NotInTimeError",
    "begin_mark",
    "counts_positions",
    "end_mark",
    "loop_micro_batches",
    "needs_all_rows",
]


class MicroBatchEnd(nn.Module):
    """Mark: a value leaves the micro-batches. The pass replaces it by a result of a loop."""

    def __init__(self, result: LoopResult) -> None:
        super().__init__()
        self.result = result


# Fixes of errors.
STATISTICS = "a model that handles each row by itself (GroupNorm for BatchNorm, no loss that compares rows)"
POSITIONS = "give the positions as an input of the model"


class NotInTimeError(LayoutError):
    """A batch cannot be split in time."""

    reason = fix = ""

    def of(self, micro: MicroBatches) -> LayoutError:
        """Return the error about the statement that splits it."""
        return layout_error("E5", f"{print_statement(micro)} {self.reason}", self.fix, micro.span)


def no_micro_batches(count: int, reason: str, fix: str = "") -> NotInTimeError:
    """Return the error for a batch that cannot be split in time; `count`: its parts."""
    reason, fix = f"cannot split the batch: {reason}", f"micro 1, or {fix}" if fix else "micro 1"
    error = NotInTimeError("E5", f"E5: micro {count} {reason}\nfix: {fix}")
    error.reason, error.fix = reason, fix
    return error


def needs_all_rows(count: int, node: NamedNode) -> LayoutError:
    """Return the error for an op that computes with the whole batch."""
    return no_micro_batches(count, f"{_placed(node)} needs its operands of all micro-batches at once", STATISTICS)


def counts_positions(count: int, node: NamedNode) -> LayoutError:
    """Return the error for an op whose arguments depend on the place of a row in the batch."""
    return no_micro_batches(count, f"{_placed(node)} counts positions along it", POSITIONS)


def _placed(node: NamedNode) -> str:
    """Return the name of an op and its line in the model."""
    return f"{node.name} ({node.origin.source})" if node.origin.source else node.name


def end_mark(one: InsertedReshard, atoms: Atoms, axes: SubMesh, coordinate: Mapping[str, int]) -> MicroBatchEnd | None:
    """Return the end of the micro-batches for a resharded value: its sum over them, or its parts joined."""
    if one.in_time is None:
        return None
    (state, atom), (after, _) = map(place_in_time, one.in_time)
    if state not in (State.SPLIT, State.PARTIAL):
        return None
    if after in (State.SPLIT, State.PARTIAL):
        raise no_micro_batches(axes[MICRO], f"{one.op} needs {one.tensor} of all micro-batches at once", STATISTICS)
    if state is State.PARTIAL:
        return MicroBatchEnd(LoopResult("sum"))
    assert atom is not None, "an axis splits an atom"

    sizes, whole = (end.local_sizes(atoms, axes, coordinate) for end in (one.source, one.reshard.source))
    return MicroBatchEnd(LoopResult("concat", sizes, atom, atoms.fold(whole)))


def begin_mark(
    one: InsertedReshard, atoms: Atoms, axes: SubMesh, coordinate: Mapping[str, int]
) -> MicroBatchSlice | MicroBatchZeros | None:
    """Return the step that takes the part of one micro-batch of a resharded value."""
    if one.in_time is None:
        return None
    state, atom = place_in_time(one.target)
    if state is State.PARTIAL:
        return MicroBatchZeros()
    if state is not State.SPLIT:
        return None
    assert atom is not None, "an axis splits an atom"
    assert one.target.splits[atom][0] == MICRO, "a micro-batch has rows of all ranks"
    sizes, part = (end.local_sizes(atoms, axes, coordinate) for end in (one.reshard.target, one.target))
    return MicroBatchSlice(sizes, atom, axes[MICRO], atoms.fold(part))


# Make the module of a body from its graph and the modules that it calls.
Finish = Callable[[Graph, dict[str, nn.Module]], GraphModule]
# Make the body of both halves of a micro-batch, and how its results join, from the body of one.
Double = Callable[[Graph, dict[str, nn.Module], Sequence[LoopResult]], tuple[Graph, tuple[LoopResult, ...]]]


def loop_micro_batches(
    graph: Graph,
    modules: dict[str, nn.Module],
    count: int,
    regathered: frozenset[str],
    finish: Finish,
    stages: StageCut | None = None,
    double: Double | None = None,
) -> Graph:
    """Return the graph with a loop for each group of values that leave the micro-batches; `graph` is taken apart.

    `count`: parts of the batch. `regathered`: placeholders of parameters that each micro-batch gathers and frees. With
    `stages` a loop over ops with parameters runs the parts of this rank's stage. With `double` a micro-batch has two
    parts, which run side by side.
    """
    return _Looping(graph, modules, count, regathered, finish, stages, double).run()


def _gathers(module: ReshardModule) -> bool:
    """Return whether a parameter is used in other splits than it is stored; a whole one has no copy to free."""
    reshard = module.conversion.reshard
    return reshard.source.splits != reshard.target.splits


class _Looping:
    def __init__(
        self,
        graph: Graph,
        modules: dict[str, nn.Module],
        count: int,
        regathered: frozenset[str],
        finish: Finish,
        stages: StageCut | None,
        double: Double | None,
    ) -> None:
        self.graph = graph
        self.double = double
        self.stages = stages
        self.regathered = regathered
        self.finish = finish
        self.modules = modules
        self.count = count
        self.nodes = list(graph.nodes)
        # Number of loops before a value, and nodes that depend on the number of the micro-batch.
        self.level: dict[Node, int] = {}
        self.varying: set[Node] = set()
        self.ends: dict[int, list[Node]] = {}
        self.out = Graph()
        self.copies: dict[Node, Node] = {}

    def run(self) -> Graph:
        for node in self.nodes:
            self._classify(node)
        self._check()
        for node in self.nodes:
            if node.op == "placeholder":
                self.copies[node] = self.out.node_copy(node)
        for node in self.nodes:
            if node.op not in ("placeholder", "output") and node not in self.varying and node not in self.copies:
                self._place(node)
        output = self.graph.output_node()
        self.out.output(_mapped(output.args[0], self.copies))
        if self.stages is not None:
            _erase_unread(self.out, self.modules)
        for node in self.varying:
            if node.op == "call_module":
                self.modules.pop(str(node.target), None)
        return self.out

    def _module(self, node: Node) -> nn.Module | None:
        return self.modules.get(str(node.target)) if node.op == "call_module" else None

    def _classify(self, node: Node) -> None:
        module = self._module(node)
        sources = node.all_input_nodes
        level = max((self.level[one] for one in sources), default=0)
        if isinstance(module, MicroBatchEnd):
            self.ends.setdefault(level, []).append(node)
            self.level[node] = level + 1
            return
        self.level[node] = level
        # All of these differ between micro-batches, or are gathered anew in each.
        starts = (
            isinstance(module, MicroBatchSlice | MicroBatchZeros)
            or (isinstance(module, RandomOp) and module.varies)
            or (isinstance(module, ReshardModule) and sources[0].name in self.regathered and _gathers(module))
        )
        if node.op != "output" and (starts or any(one in self.varying for one in sources)):
            self.varying.add(node)

    def _check(self) -> None:
        """Raise where two loops would draw the same numbers, from a generator that has moved on."""
        for node in self.varying:
            if is_random(node) and any(self.level[user] > self.level[node] for user in self._varying_after(node)):
                reason = f"{node.name} draws random numbers that are used before and after a sum over all of them"
                raise no_micro_batches(self.count, reason)

    def _varying_after(self, node: Node) -> set[Node]:
        found: set[Node] = set()
        left = [node]
        while left:
            for user in left.pop().users:
                if user in self.varying and user not in found:
                    found.add(user)
                    left.append(user)
        return found

    def _place(self, node: Node) -> None:
        """Copy a node that runs once after all that it reads; the end of a loop brings the loop."""
        left = [node]
        while left:
            one = left[-1]
            if one in self.copies:
                left.pop()
                continue
            if isinstance(self._module(one), MicroBatchEnd):
                level = self.level[one] - 1
                missing = [each for each in self._inputs(level) if each not in self.copies]
                if not missing:
                    self._loop(level)
            else:
                missing = [each for each in one.all_input_nodes if each not in self.copies]
                if not missing:
                    self.copies[one] = self.out.node_copy(one, self.copies.__getitem__)
            left += missing

    def _body(self, level: int) -> list[Node]:
        """Return the varying nodes that the ends of a level depend on, in the order of the graph."""
        found: set[Node] = set()
        left = [one for end in self.ends[level] for one in end.all_input_nodes]
        while left:
            node = left.pop()
            if node in self.varying and node not in found:
                found.add(node)
                left += node.all_input_nodes
        return [node for node in self.nodes if node in found]

    def _inputs(self, level: int) -> list[Node]:
        """Return the values from outside that a loop reads."""
        body = self._body(level)
        inside = set(body)
        read = [one for node in (*body, *self.ends[level]) for one in node.all_input_nodes]
        return list(dict.fromkeys(one for one in read if one not in inside))

    def _loop(self, level: int) -> None:
        body, inputs, ends = self._body(level), self._inputs(level), self.ends[level]
        inner = Graph()
        number = inner.placeholder("micro_batch")
        values = {one: inner.placeholder(one.name) for one in inputs}
        for one, placeholder in values.items():
            placeholder.meta.update({key: one.meta[key] for key in ("local_shape", VALUE) if key in one.meta})
        called: dict[str, nn.Module] = {}
        keys: dict[Node, Node] = {}
        for node in body:
            module = self._module(node)
            if module is not None:
                called[str(node.target)] = module
            if isinstance(module, RandomOp):
                key, *_ = node.args
                assert isinstance(key, Node), node
                if key not in keys:
                    called["micro_batch_key"] = MicroBatchKey()
                    keys[key] = inner.call_module("micro_batch_key", (number, values[key]))
                copy = inner.node_copy(node, lambda one, key=key: keys[key] if one is key else values[one])  # type: ignore[misc]
            else:
                copy = inner.node_copy(node, values.__getitem__)
            if isinstance(module, MicroBatchSlice | MicroBatchZeros):
                copy.args = (number, *copy.args)
            values[node] = copy
        results = tuple(values[end.all_input_nodes[0]] for end in ends)
        inner.output(results)
        name = f"micro_batches_{level}" if level else "micro_batches"
        marks = [self._module(end) for end in ends]
        joins = tuple(mark.result for mark in marks if isinstance(mark, MicroBatchEnd))
        count = self.count
        if self.double is not None:
            (inner, joins), count = self.double(inner, called, joins), count // 2
        read: Sequence[int] = range(len(inputs))
        absent: list[Node] = []
        if self.stages is not None and any(self.stages.part_of(node) is not None for node in body):
            placeholders = self.out.find_nodes(op="placeholder")
            absent = [one for one in placeholders if self.stages.is_elsewhere(one.name)]
            placeholders = inner.find_nodes(op="placeholder")[1:]
            origins = {to: self._origin(one, self.stages) for one, to in zip(inputs, placeholders, strict=True)}
            found, read = cut_in_parts(inner, called, self.stages, joins, origins, count, len(absent), self.finish)
            self.modules[name] = found
        else:
            self.modules[name] = MicroBatchLoop(self.finish(inner, called), count, joins)
        arguments = (*(self.copies[inputs[place]] for place in read), *absent)
        call = self.out.call_module(name, arguments)
        for place, end in enumerate(ends):
            value = self.copies[end] = self.out.call_function(operator.getitem, (call, place))
            value.meta.update(end.meta)
            self.modules.pop(str(end.target), None)

    def _origin(self, node: Node, stages: StageCut) -> InputOrigin:
        ends = {end for level in self.ends.values() for end in level}
        sources = _sources(node, ends)
        results = {one for end in sources & ends for one in _sources(end, set())}
        names = frozenset(one.name for one in sources if one.op == "placeholder")
        return InputOrigin(names, any(stages.is_learned(one.name) for one in results))


def _sources(node: Node, last: Set[Node]) -> set[Node]:
    """Return a node and all that it follows from, up to some of them."""
    left, found = [node], {node}
    while left:
        one = left.pop()
        if one not in last:
            left += [source for source in one.all_input_nodes if source not in found]
            found.update(one.all_input_nodes)
    return found


def _erase_unread(graph: Graph, modules: dict[str, nn.Module]) -> None:
    """Erase what no output needs: the gathers of parameters that other stages store."""
    for node in reversed(list(graph.nodes)):
        if node.op not in ("placeholder", "output") and not node.users:
            graph.erase_node(node)
            if node.op == "call_module":
                modules.pop(str(node.target), None)


def _mapped(value: Any, copies: Mapping[Node, Node]) -> Any:
    if isinstance(value, Node):
        return copies[value]
    return tuple(_mapped(one, copies) for one in value) if isinstance(value, Sequence) else value
