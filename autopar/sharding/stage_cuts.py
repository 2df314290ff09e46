"""Cuts of a model into the parts of a pipeline.

Ops of the micro-batches that follow from parameters stand in the order of the graph; a cut goes before one of them.
Places between layers are preferred. Parts that no line names have about equal work.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from math import prod

import numpy as np

from autopar.errors import LayoutError
from autopar.ir.graph import NamedGraph
from autopar.ir.values import NamedNode
from autopar.sharding.assignment import Assignment
from autopar.sharding.layout.matching import glob_matches
from autopar.sharding.layout.source import SourceSpan, layout_error, unknown_name
from autopar.sharding.layout.syntax import CutStatement, PartPin, PipelineStatement
from autopar.sharding.sharding import MICRO

__all__ = ["StageCuts", "balanced", "is_of", "paths_of"]


class StageCuts:
    """Ops of the micro-batches that follow from parameters, in the order of the graph."""

    def __init__(
        self,
        graph: NamedGraph,
        assignment: Assignment,
        pipeline: PipelineStatement,
        slow: Sequence[float],
        work: Mapping[str, float] | None,
    ) -> None:
        self.graph = graph
        self.work = work
        self.pipeline = pipeline
        # Time of each part for equal work.
        self.slow, self.count = slow, len(slow)
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
            own = [node.name for node in self.body if is_of(node.name, pin.glob)]
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
        if name in self.first:
            return self.first[name]
        for place, node in enumerate(self.body):
            if is_of(node.name, name) or any(glob_matches(name, own) for own in filter(None, node.outputs)):
                return place
        raise self._unknown(name, cut.span)

    @cached_property
    def first(self) -> Mapping[str, int]:
        """Return the place of the first op by the names that a cut may have: of an op, a module, a value."""
        found: dict[str, int] = {}
        for place, node in enumerate(self.body):
            for name in (node.name, *paths_of(node.name), *filter(None, node.outputs)):
                found.setdefault(name, place)
        return found

    def _unknown(self, name: str, span: SourceSpan | None) -> LayoutError:
        known = sorted({path for node in self.body for path in paths_of(node.name)})
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
        between = self.between_layers()
        following = (bisect_left(places, place) for place in between if place)
        candidates = sorted({places[i] for i in following if i < len(places)})
        # Only a stage of several chunks may have one without a layer.
        if len(candidates) + 1 - (self.pipeline.chunks == 1 and between[-1] < len(self.body)) < self.count:
            for most in sorted(set(crossing[1:])):
                candidates = [place for place in places if crossing[place] <= most]
                if len(candidates) + 1 >= self.count:
                    break
        return balanced(work, candidates, fixed, self.slow)

    def between_layers(self) -> list[int]:
        """Return the places before, between and behind the layers of all stacks."""
        stacks = [stack for stack in self.graph.stacks if stack.are_distinct]
        layers = {layer.path: number for number, stack in enumerate(stacks) for layer in stack.layers}
        begins, ends = dict[str, int](), dict[int, int]()
        for place, node in enumerate(self.body):
            for path in layers.keys() & set(paths_of(node.name)):
                begins.setdefault(path, place)
                ends[layers[path]] = place + 1
        return sorted({*begins.values(), *ends.values(), *(() if begins else (0,))})

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


def is_of(op: str, name: str) -> bool:
    """Return whether an op has a name, or stands in a module of this path."""
    return glob_matches(name, op) or any(glob_matches(name, path) for path in paths_of(op))


def paths_of(op: str) -> Iterator[str]:
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


def balanced(
    work: Sequence[float], candidates: Sequence[int], fixed: Sequence[float], slow: Sequence[float] = ()
) -> list[int]:
    """Return the candidates that begin the later parts, so that the most work of a part is least.

    A part has the work between two of them, and what is fixed.
    """
    ends = [*candidates, len(work) - 1]
    until = np.array([work[end] for end in ends])
    # sums[i, j]: work between two ends, in order.
    sums = np.where(np.tri(len(ends), dtype=bool), np.inf, until - until[:, None])
    # least[j]: largest part of the best cuts of all before ends[j]; chosen: the last of these cuts.
    slow = slow or (1.0,) * len(fixed)
    least, chosen = (until + fixed[0]) * slow[0], []
    for more, slower in zip(fixed[1:], slow[1:], strict=True):
        options = np.maximum(least[:, None], (sums + more) * slower)
        chosen.append(options.argmin(axis=0))
        least = options.min(axis=0)
    found, place = [], len(ends) - 1
    for best in reversed(chosen):
        place = int(best[place])
        found.append(ends[place])
    return found[::-1]
