"""Layout without holes from an assignment; propagation of the layout gives the same assignment.

First come few rules that cover most (`fit_rules`), then a pin for each tensor that they get wrong. Propagation then
shows the choices it would take: ops that decide otherwise are pinned, and broadcasts that begin elsewhere. Pins may
move other broadcasts, so this repeats until nothing differs. In micro-batches ops are smaller, and may decide otherwise
than in a whole batch: at the end the layout is propagated as it is read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from autopar.errors import LayoutError
from autopar.ir.graph import NamedGraph
from autopar.ir.values import NamedNode
from autopar.mesh import Mesh, SubMesh
from autopar.plans.fit_rules import TensorAxes, axes_by_tensor, bare_rules, is_uneven, rules_for, word_of
from autopar.plans.format import cover
from autopar.sharding.assignment import Assignment, StepPlan
from autopar.sharding.choices import BROADCAST, Choice, can_split
from autopar.sharding.layout.drift import DriftStatement
from autopar.sharding.layout.language import Layout
from autopar.sharding.layout.syntax import (
    Axes,
    Block,
    DimRule,
    GatherStatement,
    MeshStatement,
    OpPin,
    Pin,
    PinState,
    Recompute,
    Scope,
    SplitTerm,
    Statement,
    TensorPattern,
)
from autopar.sharding.propagation import PropagationCache, propagate_partly
from autopar.sharding.shares import marked_for, with_numbers
from autopar.sharding.time_slice import propagate_plan

# Rounds before all ops and values are pinned; pins may change where other broadcasts begin.
ROUNDS = 8


# Words of an op's pin, and the factors that are split unevenly.
_Choice = tuple[tuple[tuple[str, Axes], ...], tuple[str, ...]]


@dataclass(frozen=True)
class WrittenLayout:
    """Statements of a plan by subject."""

    mesh: tuple[Statement, ...]
    rules: tuple[Statement, ...]
    tensors: tuple[Statement, ...]
    ops: tuple[Statement, ...]
    holds: tuple[Statement, ...]
    # The plan that propagation makes of them, where it runs micro-batches.
    read: StepPlan | None = None

    @property
    def layout(self) -> Layout:
        return Layout((*self.mesh, *self.rules, *self.tensors, *self.ops, *self.holds), "<plan>")


def write_layout(
    graph: NamedGraph, assignment: Assignment, mesh: Mesh | None = None, in_time: tuple[Statement, ...] = ()
) -> WrittenLayout:
    """Return the layout from which `propagate` makes this assignment; `in_time` are its statements about time."""
    head = MeshStatement(mesh or Mesh(**assignment.axes))
    # The assignment is that of one replica, which does not drift.
    of_replica = Layout(tuple(one for one in in_time if not isinstance(one, DriftStatement)))
    found = _LayoutWriter(marked_for(graph, assignment.axes), assignment, of_replica).run()
    rules, tensors = (with_numbers(statements, assignment.axes) for statements in (found.rules, found.tensors))
    return replace(found, mesh=(head, *in_time), rules=rules, tensors=tensors)


@dataclass
class _LayoutWriter:
    graph: NamedGraph
    assignment: Assignment
    in_time: Layout
    # Names of ops with a pin.
    pinned: set[str] = field(default_factory=set)
    # Names of values whose pin sets partial sums or broadcasts.
    stated: set[str] = field(default_factory=set)
    known: PropagationCache = field(default_factory=PropagationCache)

    def __post_init__(self) -> None:
        self.axes = self.assignment.axes
        self.tensor_axes = axes_by_tensor(self.graph, self.assignment)
        self.names = list(self.graph.tensors)
        self.stated |= {name for name, entry in self.tensor_axes.items() if entry.partial}

    def run(self) -> WrittenLayout:
        rules = bare_rules(self.tensor_axes.values(), self.axes)
        holds = tuple(self._holds())
        right = self._right_roles(Layout(rules))
        for count in range(ROUNDS + 1):
            tensors = tuple(self._tensors(right))
            found = WrittenLayout((), rules, tensors, tuple(self._ops()), holds)
            made = propagate_partly(self.graph, found.layout, self.axes, self.assignment, self.known)
            is_last = count == ROUNDS
            if not self._pin_what_differs(*made):
                try:
                    read = self._read(found)
                except LayoutError:  # requests alone are infeasible for an op of a micro-batch
                    if is_last:
                        raise
                    self._pin_everything()
                    continue
                # What cannot be said of micro-batches is as it is read.
                if read is None or is_last or not self._pin_what_differs(read.assignment, frozenset()):
                    return replace(found, read=read)
            if count == ROUNDS - 1:
                # This ends the loop: what is left undecided then is a bug.
                self._pin_everything()
        raise AssertionError("these decisions are none that a layout comes to")

    def _pin_everything(self) -> None:
        self.pinned |= {node.name for node in self.graph.nodes}
        self.stated |= {name for name, entry in self.tensor_axes.items() if entry.partial or entry.broadcast}

    def _read(self, found: WrittenLayout) -> StepPlan | None:
        """Return the plan that propagation makes of a layout in micro-batches; None without micro-batches."""
        if self.in_time.micro_batches is None:
            return None
        pipelining = self.assignment.pipelining
        axes = self.axes if pipelining is None else pipelining.mesh
        return propagate_plan(self.graph, Layout((*self.in_time, *found.layout)), axes, self.known)

    def _right_roles(self, rules: Layout) -> Mapping[str, frozenset[str]]:
        """Return by tensor the roles that rules without tensor names get right."""
        known: dict[object, frozenset[str]] = {}
        found = {}
        for name, entry in self.tensor_axes.items():
            key = entry.alike
            if key not in known:
                known[key] = entry.right_roles(rules, self.axes)
            found[name] = known[key]
        return found

    def _pin_what_differs(self, found: Assignment, undecided: Collection[str]) -> bool:
        """Pin what propagation decides otherwise; return True if anything differed."""
        differs = False
        for node in self.graph.nodes:
            wanted, got = self.assignment.ops[node.name], found.ops[node.name]
            if got == wanted and node.name not in undecided:
                continue
            differs = True
            if got.results != wanted.results or node.name in self.pinned:
                self.stated |= {
                    name for name in node.outputs if name in self.tensor_axes and self.tensor_axes[name].broadcast
                }
            if got.choice != wanted.choice or node.name in undecided:
                self.pinned.add(node.name)
        for name, entry in self.tensor_axes.items():
            if found.values[name] != self.assignment.values[name] and name not in self.stated:
                # Partial sums that came here over other ops end where these are pinned.
                assert entry.broadcast or differs, f"{name} is {found.values[name]}, not {self.assignment.values[name]}"
                self.stated |= {name} if entry.broadcast else set()
                differs = True
        return differs

    # -- tensors

    def _tensors(self, right: Mapping[str, frozenset[str]]) -> Iterator[Statement]:
        """Yield a pin or blocks for each kind of tensor that the rules get wrong."""
        texts = {name: self._text(name) for name in self.tensor_axes}
        # Of tensors with the same text the rules may get other roles right, as dims without a split have no part in it.
        groups: dict[tuple[object, frozenset[str]], list[str]] = {}
        for name, entry in self.tensor_axes.items():
            if name in self.stated or len(right[name]) < len(entry.roles):
                groups.setdefault((texts[name], right[name]), []).append(name)
        alike: dict[object, list[str]] = {}
        for name, text in texts.items():
            alike.setdefault(text, []).append(name)
        for (text, _), names in groups.items():
            entry = self.tensor_axes[names[0]]
            for glob in cover(names, alike[text], self.names):
                yield from self._statements(glob, entry, names[0] in self.stated, right[names[0]])

    def _text(self, name: str) -> object:
        """Return a key: equal for tensors that the same statements describe."""
        entry = self.tensor_axes[name]
        said = tuple((role if len(entry.roles) > 1 else "", self._rules(entry, role)) for role, _ in entry.roles)
        return said, (entry.partial, entry.broadcast) if name in self.stated else ()

    def _rules(self, entry: TensorAxes, role: str) -> tuple[DimRule, ...]:
        return rules_for(entry.tensor, entry.of(role), self.axes)

    def _statements(self, glob: str, entry: TensorAxes, stated: bool, right: frozenset[str]) -> Iterator[Statement]:
        states: tuple[PinState, ...] = ()
        if stated:
            both = (("partial", entry.partial), ("broadcast", entry.broadcast))
            states = tuple(PinState(word, axes) for word, axes in both if axes)  # type: ignore[arg-type]
        if entry.is_one:
            yield Pin(glob, self._rules(entry, entry.roles[0][0]), states)
            return
        if states:
            yield Pin(glob, (self._common(entry),), states)
        if "use" not in right:
            yield Block((Scope("use", glob=glob),), self._rules(entry, "use"))
        if "param" not in right:
            grouped: dict[object, list[str]] = {}
            for role in ("param", "grad", "opt"):
                grouped.setdefault(entry.of(role), []).append(role)
            for roles in grouped.values():
                scopes = tuple(Scope(role, glob=glob) for role in roles)  # type: ignore[arg-type]
                yield Block(scopes, self._rules(entry, roles[0]))

    def _common(self, entry: TensorAxes) -> DimRule:
        """Return a rule of a parameter that is true in all roles, since a pin sets all of them."""
        for i, atom in enumerate(entry.tensor.atoms):
            splits = {splits[i] for _, splits in entry.roles}
            if len(splits) == 1 and (split := splits.pop()):
                pad = is_uneven(atom, split, self.axes)
                return DimRule((word_of(entry.tensor, i),), TensorPattern((SplitTerm(split, pad=pad),)))
        raise AssertionError(f"nothing holds for {entry.tensor} in all roles")

    # -- ops

    def _ops(self) -> Iterator[Statement]:
        nodes = {node.name: node for node in self.graph.nodes}
        texts = {name: choice_words(nodes[name], self.assignment.ops[name].choice, self.axes) for name in nodes}
        groups: dict[_Choice, list[str]] = {}
        for name in nodes:
            if name in self.pinned:
                groups.setdefault(texts[name], []).append(name)
        for (choice, uneven), names in groups.items():
            yield from (OpPin(glob, choice, uneven=uneven) for glob in cover(names, names, list(nodes)))

    # -- holds

    def _holds(self) -> Iterator[Statement]:
        gather_policies = self.assignment.gather_policies
        again = [name for name, gather_policy in gather_policies.items() if gather_policy.regather]
        if again and len(again) == len(gather_policies):
            yield GatherStatement("regather", "*")
        else:
            yield from (GatherStatement("regather", glob) for glob in cover(again, again, list(gather_policies)))
        yield from self._recomputed()

    def _recomputed(self) -> Iterator[Statement]:
        modes: dict[Recompute, list[str]] = {}
        for path, mode in getattr(self.assignment, "recompute", {}).items():
            if mode != "none":
                modes.setdefault(mode, []).append(path)
        paths = list(self.graph.ops_of_layers)
        for mode, own in modes.items():
            yield from (GatherStatement("recompute", glob, mode) for glob in cover(own, own, paths))


def choice_words(node: NamedNode, choice: Choice, axes: SubMesh) -> _Choice:
    """Return the words for the behaviour of an op along each axis."""
    said: list[tuple[str, Axes]] = []
    uneven: list[str] = []
    for (factor, atom), split in choice.splits:
        word = factor if len(node.atoms[factor]) == 1 else f"{factor}.{atom}"
        said.append((word, split))
        if not can_split(node, (factor, atom), split, axes):
            uneven.append(word)
    passes: dict[str, list[str]] = {}
    for axis, way in choice.passes:
        groups = [frozenset(group) for group in node.rule.linear]
        word = "broadcast" if way == BROADCAST else f"partial.{groups.index(way)}"
        passes.setdefault(word, []).append(axis)
    said += [(word, tuple(through)) for word, through in passes.items()]
    used = {axis for _, through in said for axis in through}
    idle = tuple(axis for axis in axes if axis not in used)
    if idle:
        said.append(("none", idle))
    return tuple(said), tuple(uneven)
