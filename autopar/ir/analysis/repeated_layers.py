"""Repeated layers: stretches of the graph that repeat the same ops, each on the results of the one before.

The search uses the graph alone, not the names of modules. Node i and node i + period match if their op, constants and
shapes are equal and each pair of operands (a, b) is
  - two parameters, buffers or constants of one shape, or
  - one value from outside (a is b), or
  - b = a + period: inside the layer, or carried from the layer before.
In the first layer the carried values come from elsewhere: there a may be any earlier value, if it corresponds to the
same b everywhere. A run of m matches makes m // period + 1 layers. One more layer may precede the run, with foreign
nodes in between (T5 computes its position bias within its first layer). A walk back from its results finds it.
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
from autopar.ir.fx_graphs import frozen_argument


@dataclass(frozen=True)
class RepeatedLayers:
    """Stack of equal layers."""

    # Index of the first node among the call_function nodes.
    start: int
    # `layers[t][k]` is the node of step k in layer t. Nodes of a layer are contiguous, except perhaps in the first.
    layers: tuple[tuple[str, ...], ...]
    # Names of the layers; equal or empty if no module distinguishes them.
    module_paths: tuple[str, ...]

    @property
    def period(self) -> int:
        return len(self.layers[0])

    @property
    def count(self) -> int:
        return len(self.layers)


def repeated_layers(exported: Exported) -> tuple[RepeatedLayers, ...]:
    """Return the repeats that cover most of the graph without overlap; among equals those with short layers."""
    own = {p.node for p in exported.placeholders if p.kind != "input"}
    calls = _Calls([n for n in exported.graph_module.graph.nodes if n.op == "call_function"], own)
    runs: list[_LayerRun] = []
    for period in range(1, len(calls.nodes) // 2 + 1):
        for first, last in calls.equal_stretches(period):
            # Two layers of a stack are one layer of twice the period: skip multiples of what was found.
            base = [run for run in runs if period % run.period == 0 and run.start <= first and last <= run.stop]
            if not base:
                runs.extend(calls.runs(period, first, last))
    found = sorted((calls.repeat(run) for run in _best(runs)), key=lambda repeat: -repeat.period * repeat.count)
    taken: set[str] = set()
    disjoint = []
    # The layer before a run may overlap a smaller run.
    for repeat in found:
        names = {name for layer in repeat.layers for name in layer}
        if not names & taken:
            disjoint.append(repeat)
            taken |= names
    return tuple(sorted(disjoint, key=lambda repeat: repeat.start))


@dataclass(frozen=True)
class _LayerRun:
    """Run of `count` layers of `period` nodes from index `start` on."""

    start: int
    period: int
    count: int

    @property
    def stop(self) -> int:
        return self.start + self.period * self.count


@dataclass(frozen=True)
class _Carried:
    """Operand `before` of node `index` in the first layer; in the second, `after` of the first is in its place."""

    index: int
    before: int
    after: int


class _Calls:
    """Calls of a graph as numbers: signatures and operands."""

    def __init__(self, nodes: list[Node], own: set[str]) -> None:
        self.nodes = nodes
        self.index = {node: i for i, node in enumerate(nodes)}
        numbers: dict[Hashable, int] = {}
        self.signatures = np.array([numbers.setdefault(_signature(node), len(numbers)) for node in nodes])
        origins = (node.meta.get("origin") for node in nodes)
        paths = (origin.module_path if origin is not None else "" for origin in origins)
        self.paths: list[tuple[str, ...]] = [tuple(path.split(".")) if path else () for path in paths]
        self.uses_parameter = [any(s.name in own for s in n.all_input_nodes) for n in nodes]
        outside: dict[Hashable, int] = {}

        def number(source: Node) -> int:
            """Return the index of a call, or a negative number for a placeholder."""
            if source in self.index:
                return self.index[source]
            # All parameters of one shape have one number, because each layer has its own.
            key: Hashable = _shape(source.meta["val"]) if source.name in own else source.name
            return -1 - outside.setdefault(key, len(outside))

        self.operands = [tuple(map(number, _inputs(node))) for node in nodes]

    def equal_stretches(self, period: int) -> Iterator[tuple[int, int]]:
        """Yield ranges [first, last) with equal signatures `period` apart, if long enough for two layers."""
        equal = self.signatures[:-period] == self.signatures[period:]
        edges = np.flatnonzero(np.diff(np.concatenate(([False], equal, [False])).astype(np.int8)))
        for first, last in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            if last - first >= period:
                yield first, last

    def runs(self, period: int, first: int, last: int) -> Iterator[_LayerRun]:
        """Yield the runs of layers within a range of equal signatures."""
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
        """Return the operands of node i carried from elsewhere; None if node i and node i + period differ."""
        mine, other = self.operands[i], self.operands[i + period]
        if len(mine) != len(other):
            return None
        carried = []
        for position, (a, b) in enumerate(zip(mine, other, strict=True)):
            if a == b or (a >= 0 and b == a + period):
                continue
            if b < 0 or a >= b or b >= i + period:
                return None
            sources = (_inputs(self.nodes[index])[position] for index in (i, i + period))
            if len({_shape(source.meta["val"]) for source in sources}) > 1:
                return None
            carried.append(_Carried(i, a, b))
        return carried

    def _runs_within(self, period: int, first: int, last: int, carried: list[_Carried]) -> Iterator[_LayerRun]:
        """Yield the longest valid runs in a stretch of matches: only the first layer has carried operands."""
        # A run may begin right after a carried operand, or with the layer that has it.
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
            # Any start within the slack is valid: take one whose layers have the longest common module path, and of
            # these one that ends between the modules nearest to the model.
            shifts = [d for d in range(slack + 1) if _valid_until(carried, start + d, period, stop) == stop]
            layers = [(d, self.paths[start + d : start + d + period]) for d in shifts]
            shift = -max(
                (len(common_path(paths)), -self._end_depth(start + d, period), len(paths[0]), -d) for d, paths in layers
            )[3]
            run = _LayerRun(start + shift, period, count + 1)
            if self._is_layer(run):
                yield run

    def _end_depth(self, start: int, period: int) -> int:
        """Return the depth of the innermost module in which a layer ends and the next one begins."""
        return len(common_path(self.paths[start + period - 1 : start + period + 1]))

    def _is_layer(self, run: _LayerRun) -> bool:
        """Return True if layers have parameters, and each computes on results of the one before."""
        second = range(run.start + run.period, run.start + 2 * run.period)
        handed_on = {a + run.period for i in second for a in self.operands[i] if run.start <= a < second.start}
        derived: set[int] = set()
        for i in second:
            if any(run.start <= a < second.start or a in derived for a in self.operands[i]):
                derived.add(i)
        return bool(handed_on & derived) and any(self.uses_parameter[i] for i in second)

    def repeat(self, run: _LayerRun) -> RepeatedLayers:
        layers = [list(range(run.start + t * run.period, run.start + (t + 1) * run.period)) for t in range(run.count)]
        while (before := _LayerBefore(self, layers[0], layers[1]).found()) is not None:
            layers.insert(0, before)
        paths = _layer_paths([[self.paths[i] for i in layer] for layer in layers])
        names = tuple(tuple(self.nodes[i].name for i in layer) for layer in layers)
        return RepeatedLayers(min(layers[0]), names, paths)


class _LayerBefore:
    """Search for the layer before the first one of a run; other nodes may stand between its nodes."""

    def __init__(self, calls: _Calls, first: Sequence[int], second: Sequence[int]) -> None:
        self.calls, self.first = calls, first
        self.step = {index: k for k, index in enumerate(first)}
        self.found_steps: dict[int, int] = {}
        # Operand of the first layer from outside -> the step that it corresponds to.
        self.handed_on: dict[int, int] = {}
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
        """Return True if `candidate` and all nodes before it match `step` and the steps before it."""
        if step in self.found_steps:
            return self.found_steps[step] == candidate
        calls, mine = self.calls, self.first[step]
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
        """Match a step without effect on the next layer (a buffer update) among the users of its operands."""
        calls = self.calls
        for k, mine in enumerate(self.first):
            known = [self.step[b] for b in calls.operands[mine] if b in self.step and self.step[b] in self.found_steps]
            if k in self.found_steps or not known:
                continue
            taken = set(self.found_steps.values())
            for user in calls.nodes[self.found_steps[known[0]]].users:
                candidate = calls.index.get(user, -1)
                if candidate not in taken and self._match(k, candidate):
                    return True
        return False


def _valid_until(carried: list[_Carried], start: int, period: int, last: int) -> int:
    """Return the index where layers from `start` end: a carried operand after the first layer."""
    stands_for: dict[int, int] = {}
    for c in carried:
        if not start <= c.index < last:
            continue
        in_first = c.index < start + period and c.before < start <= c.after < start + period
        if not in_first or stands_for.setdefault(c.before, c.after) != c.after:
            return c.index
    return last


def _best(runs: list[_LayerRun]) -> list[_LayerRun]:
    """Choose disjoint runs with most nodes, then with the shortest periods: weighted interval scheduling."""
    runs = sorted(runs, key=lambda run: run.stop)
    best: list[tuple[int, int, list[_LayerRun]]] = [(0, 0, [])]
    for k, run in enumerate(runs):
        before = sum(other.stop <= run.start for other in runs[:k])
        covered, cost, chosen = best[before]
        taken = (covered + run.period * run.count, cost - run.period, [*chosen, run])
        best.append(max(taken, best[-1], key=lambda entry: entry[:2]))
    return best[-1][2]


def _inputs(node: Node) -> list[Node]:
    """Return the operands in the order of the arguments; `all_input_nodes` would drop repetitions."""
    found: list[Node] = []
    torch.fx.node.map_arg((node.args, node.kwargs), found.append)
    return found


def _signature(node: Node) -> Hashable:
    constants = torch.fx.node.map_arg((node.args, node.kwargs), lambda source: None)
    return node.target, frozen_argument(constants), _shape(node.meta.get("val"))


def _shape(val: Any) -> Hashable:
    if isinstance(val, torch.Tensor):
        return tuple(val.shape), val.dtype
    return tuple(map(_shape, val)) if isinstance(val, (list, tuple)) else None


def _layer_paths(layers: Sequence[Sequence[tuple[str, ...]]]) -> tuple[str, ...]:
    """Return a name for each layer: the common prefix of the module paths of its ops.

    Layers of modules without a common prefix (`attentions.0` and `feeds.0`) get the path of the first op.
    """
    # A path in all layers, such as that of a sum in the forward of the whole model, names none of them.
    everywhere = set(layers[0]).intersection(*layers[1:])
    own = [[path for path in layer if path not in everywhere] or layer for layer in layers]
    common = [common_path(paths) for paths in own]
    if len(set(common)) < len(layers):
        depth = next((k for k, pair in enumerate(zip(own[0][0], own[-1][0], strict=False), 1) if len(set(pair)) > 1), 0)
        common = [paths[0][:depth] for paths in own] if depth else common
    return tuple(map(".".join, common))


def common_path(paths: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the path that all of these begin with."""
    first, last = min(paths), max(paths)
    length = next((k for k, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return first[:length]
