"""What a layout leaves open, decided without a solver: each op in turn takes the choice that sends least.

A layout says what is split where; it does not say which choice an op takes, nor where a sum is resolved. Here each op,
in the order of the graph, takes a choice that uses as many of the axes as split its tensors: what is split is worked on
in parallel. Of these it takes the one with the fewest bytes sent to bring its operands into the layouts it wants and
its results into theirs, forward and backward, then the first in the order of the rule's factors. Sums are resolved
where they arise, broadcasts begin where they are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from autopar.choices import Choice, Site, can_split, choices, layouts_of, sites_of
from autopar.errors import LayoutError
from autopar.layout.check import check_layout
from autopar.layout.language import Layout as LayoutText
from autopar.layout.resolve import Wanted, atoms_of, resolve
from autopar.layout.state import Atoms, Layout
from autopar.layout.storage import stored_splits
from autopar.pinned import allows, cannot_be_had, pin_of, pinned_sites, with_constraints, words_of
from autopar.reshard import Reshard, reshard
from autopar.tracing.graph import NamedGraph, NamedNode, NamedTensor

__all__ = ["Decisions", "OpDecision", "complete"]


@dataclass(frozen=True)
class OpDecision:
    """How one op runs: its choice, the layouts it takes, those it gives, and those its results are brought into."""

    choice: Choice
    operands: tuple[Layout | None, ...]
    produced: tuple[Layout | None, ...]
    results: tuple[Layout | None, ...]


@dataclass(frozen=True)
class Decisions:
    """A layout without holes: where every tensor is, and how every op runs."""

    axes: Mapping[str, int]
    stored: Mapping[str, Layout]
    """Inputs, parameters and buffers as they are held."""
    ops: Mapping[str, OpDecision]
    """By the name of the op."""
    values: Mapping[str, Layout]
    """Every value as its consumers find it."""


def complete(graph: NamedGraph, layout: LayoutText, axes: Mapping[str, int]) -> Decisions:
    """Decide everything about a graph under a layout."""
    whole = with_constraints(layout, graph, axes)
    check_layout(whole, words_of(graph), axes)
    return _Completion(graph, whole, axes).run()


class _Completion:
    def __init__(self, graph: NamedGraph, layout: LayoutText, axes: Mapping[str, int]) -> None:
        self.graph = graph
        self.layout = layout
        self.axes = axes
        self.stored: dict[str, Layout] = {}
        self.values: dict[str, Layout] = {}
        self.used: dict[str, Wanted] = {}
        self.ops: dict[str, OpDecision] = {}

    def run(self) -> Decisions:
        for tensor in self.graph.tensors.values():
            if tensor.kind != "activation":
                self._store(tensor)
        for node in self.graph.nodes:
            self._decide(node)
        return Decisions(self.axes, self.stored, self.ops, self.values)

    def _store(self, tensor: NamedTensor) -> None:
        kind = {"param": "param", "input": "input"}.get(tensor.kind, "buffer")
        held = self._closed(resolve(self.layout, tensor, kind, self.axes))
        if tensor.kind in ("buffer", "constant"):
            held = Layout.replicated(atoms_of(tensor))  # small, and equal on all ranks
        elif tensor.kind == "param":
            held = Layout(stored_splits(self.layout, tensor, self.axes))
        self.stored[tensor.name] = self.values[tensor.name] = held
        if tensor.kind == "param":
            use = resolve(self.layout, tensor, "use", self.axes)
            self.used[tensor.name] = use
            self.values[tensor.name] = self._closed(use)

    def _closed(self, wanted: Wanted) -> Layout:
        return Layout(tuple(axes or () for axes in wanted))

    def _decide(self, node: NamedNode) -> None:
        best: tuple[tuple[int, int], OpDecision] | None = None
        targets = [None if name is None else self._target(self.graph.tensors[name]) for name in node.outputs]
        pin = pin_of(self.layout, node)
        sites = self._candidates(node, targets) if pin is None else pinned_sites(pin, node)
        for choice in choices(node, sites, self.axes):
            if pin is not None and not allows(pin, choice):
                continue
            found = layouts_of(self.graph, node, choice)
            if found is None:
                continue
            operands, produced = found
            if pin is None and not self._uses_agree(node, operands):
                continue
            results = tuple(self._result(layout, target) for layout, target in zip(produced, targets, strict=True))
            rank = (-len(choice.axes), self._sent_bytes(node, operands, produced, results))
            if best is None or rank < best[0]:
                best = rank, OpDecision(choice, operands, produced, results)
        if best is None and pin is not None:
            raise cannot_be_had(pin, node, self.axes)
        if best is None:
            raise LayoutError("E5", self._no_choice(node))
        self.ops[node.name] = best[1]
        for name, result in zip(node.outputs, best[1].results, strict=True):
            if name is not None and result is not None:
                self.values[name] = result

    def _target(self, tensor: NamedTensor) -> Wanted:
        return resolve(self.layout, tensor, "output" if tensor.name in self.graph.outputs else "act", self.axes)

    def _candidates(self, node: NamedNode, targets: list[Wanted | None]) -> dict[str, list[Site]]:
        """For each axis the sites that it splits in some operand as it stands, or in some result as it is wanted."""
        found: dict[str, list[Site]] = {axis: [] for axis in self.axes}
        ends = [
            *zip(node.rule.operands, node.operands, [None] * len(node.operands), strict=False),
            *zip(node.rule.outputs, node.outputs, targets, strict=True),
        ]
        for operand, name, target in ends:
            if operand is None or name is None:
                continue
            tensor = self.graph.tensors[name]
            splits = target if target is not None else self.values[name].splits
            for site, axes in zip(sites_of(node, operand, tensor) or (), splits, strict=False):
                if site is not None and axes:
                    for axis in axes:
                        found[axis].append(site)
        return {axis: sites for axis, sites in found.items() if sites}

    def _uses_agree(self, node: NamedNode, operands: tuple[Layout | None, ...]) -> bool:
        """Whether parameters are taken as the layout wants them where they are used."""
        for name, wanted in zip(node.operands, operands, strict=True):
            if name is None or wanted is None or name not in self.used:
                continue
            pairs = zip(self.used[name], wanted.splits, strict=True)
            if any(use is not None and use != split for use, split in pairs):
                return False
        return True

    def _result(self, produced: Layout | None, target: Wanted | None) -> Layout | None:
        """The layout that a result is brought into: as wanted; what the layout leaves open stays as it comes."""
        if produced is None or target is None:
            return None
        claimed = {axis for axes in target if axes for axis in axes}
        splits = tuple(
            tuple(axis for axis in produced.splits[i] if axis not in claimed) if axes is None else axes
            for i, axes in enumerate(target)
        )
        return Layout(splits)

    def _sent_bytes(
        self,
        node: NamedNode,
        operands: tuple[Layout | None, ...],
        produced: tuple[Layout | None, ...],
        results: tuple[Layout | None, ...],
    ) -> int:
        total = 0
        for name, wanted in zip(node.operands, operands, strict=True):
            if name is not None and wanted is not None:
                source = self.stored.get(name, self.values[name])
                total += self._bytes(self.graph.tensors[name], source, wanted)
        for name, source_layout, result in zip(node.outputs, produced, results, strict=True):
            if name is not None and source_layout is not None and result is not None:
                total += self._bytes(self.graph.tensors[name], source_layout, result)
        return total

    def _bytes(self, tensor: NamedTensor, source: Layout, target: Layout) -> int:
        found = conversion(atoms_of(tensor), source, target, self.axes)
        ways = (*found.forward, *found.backward) if tensor.requires_grad else found.forward
        return sum(step.sent_numel for step in ways) * tensor.dtype.itemsize

    def _no_choice(self, node: NamedNode) -> str:
        """Which parameters the op cannot take as the layout wants them used, and which factors are in the way."""
        used: list[str] = []
        reasons: dict[str, None] = {}
        for operand, name in zip(node.rule.operands, node.operands, strict=False):
            if operand is None or name is None or name not in self.used:
                continue
            tensor = self.graph.tensors[name]
            used.append(f"{tensor} used as {self.values[name]}")
            sites = sites_of(node, operand, tensor) or (None,) * len(tensor.atoms)
            for site, atom, axes in zip(sites, tensor.atoms, self.values[name].splits, strict=True):
                if axes:
                    reasons[self._in_the_way(node, site, atom.size, axes)] = None
        return (
            f"E5: the op {node.name} ({node.op}) cannot be split as the layout wants it: {', '.join(used)}\n"
            f"  rule  {node.rule}\n"
            f"  line  {node.origin.source}: {node.origin.source_code}\n"
            f"{''.join(f'  {reason}' + chr(10) for reason in reasons)}"
            "fix: split another dim of these parameters where they are used, or none: use @name { * -> none }"
        )

    def _in_the_way(self, node: NamedNode, site: Site | None, extent: int, axes: tuple[str, ...]) -> str:
        count = prod(self.axes[axis] for axis in axes)
        over = f"{'*'.join(axes)} = {count}"
        if site is None:
            return f"the op does not cut this dim as its tensors do, so {over} cannot split it"
        if extent % count:
            return f"the factor {site[0]} has {extent}, which {over} does not divide: uneven shards are not computed on"
        if can_split(node, site, axes, self.axes):
            return f"the factor {site[0]} can be split by {over}, but not with what its other operands or results need"
        return f"the factor {site[0]} cannot be split by {over}: the op needs all of it"


def conversion(atoms: Atoms, source: Layout, target: Layout, axes: Mapping[str, int]) -> Reshard:
    """How one layout is turned into another; forward and backward."""
    return reshard(atoms, source, target, axes)
