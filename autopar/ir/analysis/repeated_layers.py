"""Repeated layers: where the graph does the same thing again, on what the time before left behind.

Found in the graph alone, not by the names of modules. Node i and node i + period match if their op, constants and
shapes are equal and each pair of operands (a, b) is
  - two parameters, buffers or constants of one shape, or
  - one value from outside (a is b), or
  - b = a + period: inside the layer, or carried from the layer before.
In the first layer the carried values come from elsewhere: there a may be any earlier value, as long as it stands for
the same b everywhere. A run of m matches makes m // period + 1 layers. A further layer before the run, with nodes of
others in between (T5 computes its position bias within its first layer), is found by walking back from the values it
hands on.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.fx import Node

from autopar.ir.exported import Exported


@dataclass(frozen=True)
class RepeatedLayers:
    """One stack of equal layers.

    `layers[t][k]` is the name of the node that does step k in layer t; a layer's nodes follow each other in the graph,
    except perhaps in the first layer. `start` is the index of the first one among the call_function nodes.
    `module_paths` names the layers; they may be equal, or empty where no module tells them apart.
    """

    start: int
    layers: tuple[tuple[str, ...], ...]
    module_paths: tuple[str, ...]

    @property
    def period(self) -> int:
        return len(self.layers[0])

    @property
    def count(self) -> int:
        return len(self.layers)


def repeated_layers(exported: Exported) -> tuple[RepeatedLayers, ...]:
    """The repeats that cover most of the graph without overlapping; of equal ones those with the shortest layer."""
    own = {p.node for p in exported.placeholders if p.kind != "input"}
    calls = _Calls([n for n in exported.graph_module.graph.nodes if n.op == "call_function"], own)
    runs: list[_LayerRun] = []
    for period in range(1, len(calls.nodes) // 2 + 1):
        for first, last in calls.equal_stretches(period):
            base = [run for run in runs if period % run.period == 0 and run.start <= first and last <= run.stop]
            if not base:
                runs.extend(calls.runs(period, first, last))
    found = sorted((calls.repeat(run) for run in _best(runs)), key=lambda repeat: -repeat.period * repeat.count)
    taken: set[str] = set()
    disjoint = []
    for repeat in found:  # the layer before a run may stand where a smaller run is
        names = {name for layer in repeat.layers for name in layer}
        if not names & taken:
            disjoint.append(repeat)
            taken |= names
    return tuple(sorted(disjoint, key=lambda repeat: repeat.start))


@dataclass(frozen=True)
class _LayerRun:
    """`count` layers of `period` nodes from index `start` on."""

    start: int
    period: int
    count: int

    @property
    def stop(self) -> int:
        return self.start + self.period * self.count


@dataclass(frozen=True)
class _Carried:
    """At node `index` the operand `before` stands in the place of `after`, which the layer before hands on."""

    index: int
    before: int
    after: int


class _Calls:
    def __init__(self, nodes: list[Node], own: set[str]) -> None:
        self.nodes = nodes
        self.index = {node: i for i, node in enumerate(nodes)}
        numbers: dict[Hashable, int] = {}
        self.signatures = np.array([numbers.setdefault(_signature(node), len(numbers)) for node in nodes])
        self.paths = [_path(node) for node in nodes]
        # per operand: an index >= 0, or for a placeholder a negative number; all the model's own of one shape have one
        outside: dict[Hashable, int] = {}
        self.uses_parameter = [any(s.name in own for s in n.all_input_nodes) for n in nodes]
        self.operands = [tuple(self._operand(s, own, outside) for s in _inputs(n)) for n in nodes]

    def _operand(self, source: Node, own: set[str], outside: dict[Hashable, int]) -> int:
        if source in self.index:
            return self.index[source]
        key: Hashable = source.name
        if source.name in own:
            key = _shape(source.meta["val"])
        return -1 - outside.setdefault(key, len(outside))

    def equal_stretches(self, period: int) -> Iterator[tuple[int, int]]:
        """[first, last) where nodes `period` apart have equal signatures, if long enough for two layers."""
        equal = self.signatures[:-period] == self.signatures[period:]
        edges = np.flatnonzero(np.diff(np.concatenate(([False], equal, [False])).astype(np.int8)))
        for first, last in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            if last - first >= period:
                yield first, last

    def runs(self, period: int, first: int, last: int) -> Iterator[_LayerRun]:
        stretch = first
        carried: list[_Carried] = []
        for i in range(first, last + 1):
            found = self._compare(i, period) if i < last else None
            if found is None:
                if i - stretch >= period:
                    yield from self._runs_within(period, stretch, i, carried)
                stretch, carried = i + 1, []
            else:
                carried.extend(found)

    def _compare(self, i: int, period: int) -> list[_Carried] | None:
        """None if node i and node i + period differ, else the operands that are carried from elsewhere."""
        mine, other = self.operands[i], self.operands[i + period]
        if len(mine) != len(other):
            return None
        carried = []
        for a, b in zip(mine, other, strict=True):
            if a == b or (a >= 0 and b == a + period):
                continue
            if b < 0 or a >= b or b >= i + period:
                return None
            if not self._same_shape(i, i + period, a, b):
                return None
            carried.append(_Carried(i, a, b))
        return carried

    def _same_shape(self, i: int, j: int, a: int, b: int) -> bool:
        position = self.operands[i].index(a)
        mine, other = _inputs(self.nodes[i])[position], _inputs(self.nodes[j])[position]
        return bool(_shape(mine.meta["val"]) == _shape(other.meta["val"]))

    def _runs_within(self, period: int, first: int, last: int, carried: list[_Carried]) -> Iterator[_LayerRun]:
        """The longest valid runs in a stretch of matches: carried operands may stand only in the first layer."""
        starts = {first}
        for c in carried:
            starts.update((max(first, c.before + 1), max(first, c.index - period + 1)))
        reached = first
        for start in sorted(starts):
            stop = _valid_until(carried, start, period, last)
            if stop - start < period or stop <= reached:
                continue
            reached = stop
            count, slack = divmod(stop - start, period)
            shifts = [d for d in range(slack + 1) if _valid_until(carried, start + d, period, stop) == stop]
            shift = max(shifts, key=lambda d: (len(self.prefix(start + d, period)), len(self.paths[start + d]), -d))
            run = _LayerRun(start + shift, period, count + 1)
            if self._is_layer(run):
                yield run

    def _is_layer(self, run: _LayerRun) -> bool:
        """Layers have parameters, and each works on what the one before made of what it was given."""
        second = range(run.start + run.period, run.start + 2 * run.period)
        handed_on = {a + run.period for i in second for a in self.operands[i] if run.start <= a < second.start}
        derived: set[int] = set()
        for i in second:
            if any(run.start <= a < second.start or a in derived for a in self.operands[i]):
                derived.add(i)
        return bool(handed_on & derived) and any(self.uses_parameter[i] for i in second)

    def prefix(self, start: int, period: int) -> tuple[str, ...]:
        """The module path that the nodes of a layer have in common."""
        paths = self.paths[start : start + period]
        return _common(paths)

    def repeat(self, run: _LayerRun) -> RepeatedLayers:
        layers = [list(range(run.start + t * run.period, run.start + (t + 1) * run.period)) for t in range(run.count)]
        while (before := _LayerBefore(self, layers[0], layers[1]).found()) is not None:
            layers.insert(0, before)
        paths = _layer_paths([[self.paths[i] for i in layer] for layer in layers])
        names = tuple(tuple(self.nodes[i].name for i in layer) for layer in layers)
        return RepeatedLayers(min(layers[0]), names, paths)


class _LayerBefore:
    """The layer before the first one found, whose nodes may stand between others."""

    def __init__(self, calls: _Calls, first: Sequence[int], second: Sequence[int]) -> None:
        self.calls = calls
        self.first = first
        self.step = {index: k for k, index in enumerate(first)}
        self.found_steps: dict[int, int] = {}
        self.handed_on: dict[int, int] = {}  # operand of the first layer from outside -> the step it stands for
        for mine, other in zip(first, second, strict=True):
            for a, b in zip(calls.operands[mine], calls.operands[other], strict=True):
                if a != b and a not in self.step and b in self.step:
                    self.handed_on[a] = self.step[b]

    def found(self) -> list[int] | None:
        if not self.handed_on or not all(self._match(k, a) for a, k in self.handed_on.items()):
            return None
        while len(self.found_steps) < len(self.first):
            if not self._match_a_side_branch():
                return None
        layer = [self.found_steps[k] for k in range(len(self.first))]
        distinct = len(set(layer)) == len(layer) and all(a < b for a, b in pairwise(layer))
        return layer if distinct and layer[-1] < self.first[0] else None

    def _match(self, step: int, candidate: int) -> bool:
        """Whether `candidate` can do what `step` does, together with all that leads to it."""
        if step in self.found_steps:
            return self.found_steps[step] == candidate
        mine = self.first[step]
        calls = self.calls
        if not 0 <= candidate < self.first[0] or calls.signatures[candidate] != calls.signatures[mine]:
            return False
        before, here = calls.operands[candidate], calls.operands[mine]
        if len(before) != len(here):
            return False
        self.found_steps[step] = candidate
        for a, b in zip(before, here, strict=True):
            if b in self.step:
                if not self._match(self.step[b], a):
                    return False
            elif a != b and b not in self.handed_on:
                return False
        return True

    def _match_a_side_branch(self) -> bool:
        """A step that leads to nothing handed on (an updated buffer): look among the users of its operands."""
        calls = self.calls
        for k, mine in enumerate(self.first):
            known = [self.step[b] for b in calls.operands[mine] if b in self.step and self.step[b] in self.found_steps]
            if k in self.found_steps or not known:
                continue
            source = calls.nodes[self.found_steps[known[0]]]
            taken = set(self.found_steps.values())
            for user in source.users:
                candidate = calls.index.get(user, -1)
                if candidate not in taken and self._match(k, candidate):
                    return True
        return False


def _valid_until(carried: list[_Carried], start: int, period: int, last: int) -> int:
    """How far layers from `start` on go before an operand is carried from elsewhere after the first layer."""
    stands_for: dict[int, int] = {}
    for c in carried:
        if not start <= c.index < last:
            continue
        in_first = c.index < start + period and c.before < start <= c.after < start + period
        if not in_first or stands_for.setdefault(c.before, c.after) != c.after:
            return c.index
    return last


def _best(runs: list[_LayerRun]) -> list[_LayerRun]:
    """Weighted interval scheduling: the most nodes covered, then the shortest periods."""
    runs = sorted(runs, key=lambda run: run.stop)
    best: list[tuple[int, int, list[_LayerRun]]] = [(0, 0, [])]
    for k, run in enumerate(runs):
        before = sum(other.stop <= run.start for other in runs[:k])
        covered, cost, chosen = best[before]
        taken = (covered + run.period * run.count, cost - run.period, [*chosen, run])
        best.append(max(taken, best[-1], key=lambda entry: entry[:2]))
    return best[-1][2]


def _inputs(node: Node) -> list[Node]:
    """Operands in the order of the arguments, one met twice twice."""
    found: list[Node] = []

    def add(source: Node) -> Node:
        found.append(source)
        return source

    torch.fx.node.map_arg((node.args, node.kwargs), add)
    return found


def _signature(node: Node) -> Hashable:
    constants = torch.fx.node.map_arg((node.args, node.kwargs), lambda source: None)
    return node.target, _frozen(constants), _shape(node.meta.get("val"))


def _frozen(value: Any) -> Hashable:
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return tuple((key, _frozen(item)) for key, item in value.items())
    return type(value), value


def _shape(val: Any) -> Hashable:
    if isinstance(val, torch.Tensor):
        return tuple(val.shape), val.dtype
    return tuple(map(_shape, val)) if isinstance(val, (list, tuple)) else None


def _layer_paths(layers: Sequence[Sequence[tuple[str, ...]]]) -> tuple[str, ...]:
    """A name for each layer: what the module paths of its ops have in common.

    Ops at a path that is in all layers, as a sum in the forward of the whole model, say nothing of theirs. Layers of
    modules with nothing in common (`attentions.0` and `feeds.0`) are named by the first.
    """
    everywhere = set(layers[0]).intersection(*layers[1:])
    own = [[path for path in layer if path not in everywhere] or layer for layer in layers]
    common = [_common(paths) for paths in own]
    if len(set(common)) < len(layers):
        depth = next((k for k, pair in enumerate(zip(own[0][0], own[-1][0], strict=False), 1) if len(set(pair)) > 1), 0)
        common = [paths[0][:depth] for paths in own] if depth else common
    return tuple(map(".".join, common))


def _common(paths: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    first, last = min(paths), max(paths)
    length = next((k for k, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return first[:length]


def _path(node: Node) -> tuple[str, ...]:
    origin = node.meta.get("origin")
    return tuple(origin.module_path.split(".")) if origin is not None and origin.module_path else ()
