"""The planner's problem for one graph, one mesh and one cluster.

Sets
    ops, each with options: a choice (which axes split which factors, what passes through the others) and the layouts
        of operands and results that follow from it
    held tensors (inputs, parameters, buffers), each with the layouts in which it may be stored
    shared values: results that several ops take, that are handed out, or of which the user's layout speaks; each with
        the layouts that its producer gives and that its consumers want. All other values stay as they are produced.

Variables
    o[n], the option of op n
    s[t], how held tensor t is stored
    v[t], the layout in which shared value t is kept, into which it is brought once, forward and backward

Constraints
    the user's layout: what it demands of a tensor or an op leaves only options that agree

Objective: minimise the seconds of `evaluate`, a convex function (`totals`) of sums over
    every op's work and what it sends by itself                                   o[n]
    every conversion of a result into the layout it is kept in, and of a value    o[producer], v[t], o[consumer]
        from that into the layout in which an op takes it
    every parameter's gathering and the reduction of its gradient                 s[t], o[consumer]
    the optimizer's work                                                          s[t]

Where two ops want one value in one layout that is not the one it is kept in, `evaluate` converts it once and the sums
here count it twice; buckets of parameters are counted at the rate of a full one. Whatever is found is priced by
`evaluate` in the end, and what is claimed is its price.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
from torch.fx import Node

from autopar.completion import OpDecision
from autopar.conversions import Inserted
from autopar.cost.compute import OpWork, Work
from autopar.cost.fusion import scaled, shares_of
from autopar.cost.optimizers import optimizer_of
from autopar.layout.holds import Recompute
from autopar.layout.resolve import atoms_of
from autopar.layout.state import Layout
from autopar.planning.candidates import Option, Stored, can_be_held, options_of, stored_of
from autopar.planning.coarse import Ways
from autopar.planning.demands import Demands
from autopar.planning.errors import no_option
from autopar.planning.kept import Kept
from autopar.planning.routes import Routes
from autopar.planning.setting import Setting
from autopar.planning.tables import Parts, Table, Tables, Wants, block_of
from autopar.planning.totals import Sum
from autopar.recompute import computed_again, regions_of
from autopar.rewrite.lowerings import split_of
from autopar.search.problem import Floats
from autopar.tracing.graph import NamedGraph, NamedNode, NamedTensor

__all__ = ["Factor", "Model", "Variable", "build"]


@dataclass(frozen=True, eq=False)
class Variable:
    """Something to decide: an op, a held tensor, a shared value. `parts` are the sums of each state by itself."""

    kind: str
    name: str
    states: tuple[Any, ...]
    parts: tuple[Parts, ...]

    def at(self, state: int) -> Floats:
        found = np.zeros(len(Sum))
        for parts in self.parts:
            for key, values in parts.items():
                found[key] += values[state]
        return found


@dataclass(frozen=True, eq=False)
class Factor:
    """What two decisions cost together: rows are the states of the first."""

    first: int
    second: int
    table: Table


@dataclass(frozen=True, eq=False)
class Model:
    setting: Setting
    variables: tuple[Variable, ...]
    factors: tuple[Factor, ...]
    place: dict[tuple[str, str], int]
    """By kind and name, the number of a variable."""
    recompute: Mapping[str, Recompute]

    def sums(self, chosen: Sequence[int]) -> Floats:
        total = np.zeros(len(Sum))
        for variable, state in zip(self.variables, chosen, strict=True):
            total += variable.at(state)
        for factor in self.factors:
            total += factor.table.at(chosen[factor.first], chosen[factor.second])
        return total


def build(
    setting: Setting,
    demands: Demands,
    tables: Tables | None = None,
    regather: bool = False,
    recompute: Mapping[str, Recompute] | None = None,
    ways: Ways | None = None,
) -> Model:
    """`regather`: parameters may be gathered again in the backward, which saves memory and never time.

    `recompute`: the layers that are computed again, which is decided outside. `ways`: the choices to take into account,
    where these are not all.
    """
    tables = tables or Tables(setting, Routes(setting.axes))
    return _Builder(setting, demands, tables, regather, recompute or {}, ways).run()


@dataclass
class _Builder:
    setting: Setting
    demands: Demands
    tables: Tables
    regather: bool
    recompute: Mapping[str, Recompute]
    ways: Ways | None = None
    known: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        graph = self.graph = self.setting.graph
        self.variables: list[Variable] = []
        self.factors: list[Factor] = []
        self.place: dict[tuple[str, str], int] = {}
        self.nodes = {node.name: node for node in graph.nodes}
        self.makers = {name: (node, i) for node in graph.nodes for i, name in enumerate(node.outputs) if name}
        self.handed = handed_out(graph)
        regions = regions_of(graph, self.recompute) if self.setting.trains else ()
        self.again = computed_again(graph, regions)
        self.shares: dict[str, float] = {}
        self.kept = Kept.of(graph)
        self.optimizer = optimizer_of(self.setting.options.optimizer)

    def run(self) -> Model:
        options = {node.name: self._options(node) for node in self.graph.nodes}
        if self.setting.options.compiled:
            whole = {name: self._work(self.nodes[name], found[0]) for name, found in options.items()}
            self.shares = shares_of(self.graph, whole)
        for node in self.graph.nodes:
            self._add("op", node.name, options[node.name], (self._op_parts(node, options[node.name]),))
        for tensor in self.graph.tensors.values():
            if tensor.kind == "activation":
                self._value(tensor)
            else:
                self._held(tensor)
        return Model(self.setting, tuple(self.variables), tuple(self.factors), self.place, self.recompute)

    def _add(self, kind: str, name: str, states: tuple[Any, ...], parts: tuple[Parts, ...]) -> int:
        self.place[kind, name] = len(self.variables)
        self.variables.append(Variable(kind, name, states, parts))
        return len(self.variables) - 1

    # -- ops

    def _signature(self, node: NamedNode) -> Any:
        """Nodes with one signature have the same options at the same prices."""
        operands = tuple(None if name is None else self._cut(self.graph.tensors[name]) for name in node.operands)
        outputs = tuple(None if name is None else self._cut(self.graph.tensors[name]) for name in node.outputs)
        rule = self._text_of_rule(node)
        own = (node.op, rule, node.source, tuple(node.atoms.items()), tuple(node.sizes.items()), operands, outputs)
        footprint = id(self.graph.footprints[node.node])
        return own, footprint, node.name in self.again, self.demands.token(node)

    def _text_of_rule(self, node: NamedNode) -> str:
        key = "rule", id(node.rule)
        if key not in self.known:
            self.known[key] = (node.rule, str(node.rule))
        text: str = self.known[key][1]
        return text

    def _cut(self, tensor: NamedTensor) -> Any:
        atoms = tuple((atom.dim, atom.size) for atom in tensor.atoms)
        return tensor.kind == "param", tensor.dtype, tensor.requires_grad, tensor.shape, atoms

    def _options(self, node: NamedNode) -> tuple[Option, ...]:
        key = "options", self._signature(node)
        if key not in self.known:
            self.known[key] = options_of(self.setting, self.demands, node, self.ways)
        found: tuple[Option, ...] = self.known[key]
        if not found:
            raise no_option(
                self.demands, node, self.setting.axes, lambda other: bool(options_of(self.setting, other, node))
            )
        return found

    def _work(self, node: NamedNode, option: Option) -> OpWork:
        decision = OpDecision(option.choice, option.operands, option.produced, option.produced)
        return self.setting.prices.work(node, decision)

    def _op_parts(self, node: NamedNode, options: tuple[Option, ...]) -> Parts:
        fused = self.shares.get(node.name)
        keeping = self._made_and_kept(node)
        inside = (
            0 if node.name in self.again or not self._keeps(node) else self.graph.footprints[node.node].internal_bytes
        )
        key = "op", self._signature(node), fused, tuple(name is not None for name in keeping)
        if key not in self.known:
            sums = np.zeros((len(Sum), len(options)))
            for i, option in enumerate(options):
                work = self._work(node, option)
                if fused is not None:
                    device = self.setting.cluster.device
                    work = OpWork(scaled(work.forward, fused, device), scaled(work.backward, fused, device))
                self._worked(sums[:, i], work, node.name in self.again)
                self._sent_inside(sums[:, i], node, option)
                share = prod(self.setting.axes[axis] for axis in option.choice.axes)
                sums[Sum.KEPT_GIB, i] += inside / share / 2**30
                for position, name in enumerate(keeping):
                    layout = option.produced[position]
                    if name is not None and layout is not None:
                        sums[Sum.KEPT_GIB, i] += self._gib(name, layout)
            self.known[key] = {part: sums[part] for part in Sum if sums[part].any()} or {Sum.DEVICE: sums[0]}
        parts: Parts = self.known[key]
        return parts

    def _made_and_kept(self, node: NamedNode) -> tuple[str | None, ...]:
        """The results of an op that live on as it makes them; shared values are counted where they are kept."""
        own = node.name not in self.again
        return tuple(
            name if own and name is not None and self.kept.is_kept(name) and not self._is_shared(name) else None
            for name in node.outputs
        )

    def _keeps(self, node: NamedNode) -> bool:
        made = (self.graph.tensors[name].requires_grad for name in node.outputs if name is not None)
        return self.setting.trains and any(made)

    def _gib(self, name: str, layout: Layout) -> float:
        tensor = self.graph.tensors[name]
        return self.tables.gib(tuple(atom.size for atom in tensor.atoms), tensor.dtype.itemsize, layout)

    def _is_shared(self, name: str) -> bool:
        """Whether a result has a variable of its own."""
        many = len(self.setting.users.get(name, ())) > 1
        return many or name in self.handed or self.demands.is_bound(self.graph.tensors[name])

    def _worked(self, sums: Floats, work: OpWork, again: bool) -> None:
        launch = self.setting.prices.launch

        def add(one: Work, room: Sum) -> None:
            sums[Sum.DEVICE] += one.seconds
            sums[room] += one.seconds
            sums[Sum.HOST] += one.launches * launch if one.seconds else 0.0

        add(work.forward, Sum.FORWARD_ROOM)
        if self.setting.trains:
            add(work.backward, Sum.BACKWARD_ROOM)
        if again:
            add(work.forward, Sum.BACKWARD_ROOM)

    def _sent_inside(self, sums: Floats, node: NamedNode, option: Option) -> None:
        """What an op sends by itself."""
        split = split_of(self.graph, node, option.choice.splits, option.operands, self.setting.axes)
        for message in split.messages() if split is not None else ():
            name = node.operands[0]
            assert name is not None, node.name
            one = Inserted(name, node.name, message.reshard, message.itemsize, message.differentiable)
            ways = [
                "forward",
                *(["backward"] if self.setting.trains else []),
                *(["forward"] if node.name in self.again else []),
            ]
            for way in ways:
                for task in self.setting.prices.conversion(one, way):
                    sums[Sum.DEVICE] += task.seconds
                    sums[Sum.HOST] += task.host_seconds

    # -- held tensors

    def _held(self, tensor: NamedTensor) -> None:
        users = self.setting.users.get(tensor.name, ())
        wants = [self._wants(node, tensor.name) for node in users]
        uses = dict.fromkeys(want.value for each in wants for one in each for want in one if want is not None)
        stored = self._stored(tensor, tuple(uses))
        trained = tensor.requires_grad and self.setting.trains
        parts = self._held_parts(tensor, stored)
        if tensor.kind == "param" and len(users) > 1:
            stored, parts = self._with_shared(tensor, stored, parts, users, wants)
        place = self._add("held", tensor.name, stored, parts)
        sizes, itemsize = tuple(atom.size for atom in tensor.atoms), tensor.dtype.itemsize
        for number, (node, want) in enumerate(zip(users, wants, strict=True)):
            if tensor.kind == "param":
                first = number == 0 and trained and self._accumulates()
                table = self.tables.parameters(
                    sizes,
                    itemsize,
                    trained,
                    stored,
                    want,
                    block_of(tensor.name),
                    (node.name, tensor.name) in self.kept.operands and node.name not in self.again,
                    self._accumulated_bytes(tensor) if first else None,
                    number > 0,
                )
                if number == 0 and trained and len(users) > 1:
                    self._add_gradients(tensor, node, want, len(users) - 1)
            else:
                layouts = [one.layout for one in stored]
                kept = (node.name, tensor.name) in self.kept.operands, False
                table = self.tables.values(sizes, itemsize, trained, layouts, want, node.name in self.again, kept)
            self.factors.append(Factor(place, self.place["op", node.name], table))

    def _stored(self, tensor: NamedTensor, uses: tuple[Layout, ...]) -> tuple[Stored, ...]:
        key = "stored", tensor.kind, self._cut(tensor), uses, self.demands.stored_token(tensor)
        if key not in self.known:
            self.known[key] = stored_of(self.setting, self.demands, tensor, uses, self.regather)
        found: tuple[Stored, ...] = self.known[key]
        return found

    def _with_shared(
        self,
        tensor: NamedTensor,
        stored: tuple[Stored, ...],
        parts: tuple[Parts, ...],
        users: Sequence[NamedNode],
        wants: Sequence[tuple[Wants, ...]],
    ) -> tuple[tuple[Stored, ...], tuple[Parts, ...]]:
        """A parameter that several ops take: converted once for those that take it in one layout."""
        counts: dict[Layout, int] = {}
        for each in wants:
            for want in dict.fromkeys(want for option in each for want in option if want is not None):
                counts[want] = counts.get(want, 0) + 1
        common = [None, *(want for want, count in counts.items() if count > 1)]
        states = tuple(
            replace(one, shared=want) for one in stored for want in common if want is None or want != one.layout
        )
        rows = np.array([stored.index(replace(one, shared=None)) for one in states])
        spread = [{key: values[rows] for key, values in part.items()} for part in parts]
        sizes, itemsize = tuple(atom.size for atom in tensor.atoms), tensor.dtype.itemsize
        kept = any((node.name, tensor.name) in self.kept.operands and node.name not in self.again for node in users)
        trained = tensor.requires_grad and self.setting.trains
        once = self.tables.shared(sizes, itemsize, trained, states, block_of(tensor.name), kept)
        return states, (*spread, once)

    def _held_parts(self, tensor: NamedTensor, stored: tuple[Stored, ...]) -> tuple[Parts, ...]:
        key = "held", tensor.kind, self._cut(tensor), stored, tuple(self.handed.get(tensor.name, ()))
        if key not in self.known:
            sums = np.zeros((len(Sum), len(stored)))
            options = self.setting.options
            for i, one in enumerate(stored):
                if tensor.kind == "param" and tensor.requires_grad and self.setting.trains:
                    prices = self.setting.prices
                    size = prices.optimizer_bytes(tensor.name, one.layout, options.optimizer, options.master_dtype)
                    sums[Sum.OPTIMIZER, i] += size / prices.device.stream
                self._stored_memory(sums[:, i], tensor, one)
                if tensor.kind == "input" and not options.local_inputs:
                    whole = Layout.replicated(atoms_of(tensor))
                    self._converted(sums[:, i], tensor, whole, one.layout, backward=False)
                self._handed_out(sums[:, i], tensor, one.layout)
            self.known[key] = {part: sums[part] for part in Sum if sums[part].any()} or {Sum.DEVICE: sums[0]}
        return (self.known[key],)

    def _stored_memory(self, sums: Floats, tensor: NamedTensor, one: Stored) -> None:
        options = self.setting.options
        size = self._gib(tensor.name, one.layout)
        if tensor.kind != "param":
            whole = Layout.replicated(atoms_of(tensor))
            inputs = size if options.local_inputs or tensor.kind != "input" else self._gib(tensor.name, whole)
            sums[Sum.KEPT_GIB] += inputs + (size if tensor.kind == "input" and one.layout != whole else 0.0)
            sums[Sum.STEP_GIB] += inputs
            return
        master = (options.master_dtype or tensor.dtype).itemsize / tensor.dtype.itemsize
        held = size * (master + (1.0 if options.master_dtype not in (None, tensor.dtype) else 0.0))
        if tensor.requires_grad and self.setting.trains:
            held += size * master * self.optimizer.states
            gradient = (options.gradient_dtype or options.master_dtype or tensor.dtype).itemsize / tensor.dtype.itemsize
            stays = self._accumulates() or not any(one.layout.splits)  # sums have a buffer of their own
            sums[Sum.KEPT_GIB] += size * gradient if stays else 0.0
            sums[Sum.STEP_GIB] += size * gradient
        sums[Sum.KEPT_GIB] += held
        sums[Sum.STEP_GIB] += held

    def _accumulates(self) -> bool:
        return self.setting.options.micro_batches > 1 or self.setting.options.gradient_dtype is not None

    def _accumulated_bytes(self, tensor: NamedTensor) -> Any:
        prices, master = self.setting.prices, self.setting.options.master_dtype
        return lambda layout: prices.accumulated(tensor.name, layout, master).bytes

    def _add_gradients(self, tensor: NamedTensor, node: NamedNode, wants: Sequence[Wants], times: int) -> None:
        """A parameter's gradients are added up in the layout in which its first user takes it."""
        key = "added", self._cut(tensor), tuple(each[0] for each in wants), times
        if key not in self.known:
            sums = np.zeros((len(Sum), len(wants)))
            for i, each in enumerate(wants):
                if each[0] is not None:
                    self._added(sums[:, i], tensor.name, each[0], times)
            self.known[key] = {part: sums[part] for part in Sum if sums[part].any()} or {Sum.DEVICE: sums[0]}
        place = self.place["op", node.name]
        own = self.variables[place]
        self.variables[place] = replace(own, parts=(*own.parts, self.known[key]))

    def _added(self, sums: Floats, name: str, layout: Layout, times: int) -> None:
        task = self.setting.prices.added(name, layout)
        sums[Sum.DEVICE] += times * task.seconds
        sums[Sum.BACKWARD_ROOM] += times * task.seconds
        sums[Sum.HOST] += times * task.host_seconds

    def _converted(
        self, sums: Floats, tensor: NamedTensor, source: Layout, target: Layout, backward: bool = True
    ) -> None:
        sizes, itemsize = tuple(atom.size for atom in tensor.atoms), tensor.dtype.itemsize
        ways = [self.tables.way(sizes, itemsize, source.value, target.value)]
        if backward and tensor.requires_grad:
            ways.append(self.tables.way(sizes, itemsize, target.gradient.value, source.gradient.value))
        for device, host in ways:
            sums[Sum.DEVICE] += device
            sums[Sum.HOST] += host

    def _handed_out(self, sums: Floats, tensor: NamedTensor, layout: Layout) -> None:
        """What it takes to hand a tensor out, from the layout in which it is kept."""
        done: set[Layout] = set()
        for whole in self.handed.get(tensor.name, ()):
            if whole or self.setting.options.outputs == "full" or not tensor.shape:
                wanted = Layout.replicated(atoms_of(tensor))
            else:
                wanted = Layout(layout.splits)
            if wanted not in done:
                done.add(wanted)
                self._converted(sums, tensor, layout, wanted)

    # -- values

    def _wants(self, node: NamedNode, name: str) -> tuple[Wants, ...]:
        """For each option of an op the layouts in which it takes a tensor."""
        options = self.variables[self.place["op", node.name]].states
        positions = [i for i, operand in enumerate(node.operands) if operand == name]
        key = "wants", id(options), tuple(positions)
        if key not in self.known:
            self.known[key] = tuple(tuple(dict.fromkeys(option.operands[i] for i in positions)) for option in options)
        found: tuple[Wants, ...] = self.known[key]
        return found

    def _value(self, tensor: NamedTensor) -> None:
        node, position = self.makers[tensor.name]
        maker = self.place["op", node.name]
        produced = self._produced(maker, position)
        users = self.setting.users.get(tensor.name, ())
        sizes, itemsize = tuple(atom.size for atom in tensor.atoms), tensor.dtype.itemsize
        trained = tensor.requires_grad and self.setting.trains
        wants = [self._wants(user, tensor.name) for user in users]
        if not self._is_shared(tensor.name):
            for user, want in zip(users, wants, strict=True):
                again, kept = user.name in self.again, self._kept_for(user, tensor.name)
                table = self.tables.values(sizes, itemsize, trained, produced, want, again, kept)
                self.factors.append(Factor(maker, self.place["op", user.name], table))
            return
        homes = self._homes(tensor, produced, wants)
        if not homes:
            raise no_option(self.demands, node, self.setting.axes, lambda other: self._has_home(tensor, node, other))
        place = self._add("value", tensor.name, homes, (self._home_parts(tensor, homes, len(users)),))
        into = tuple((home,) for home in homes)
        table = self.tables.values(sizes, itemsize, trained, produced, self._same(into), node.name in self.again)
        self.factors.append(Factor(maker, place, table))
        for user, want in zip(users, wants, strict=True):
            again, kept = user.name in self.again, self._kept_for(user, tensor.name)
            table = self.tables.values(sizes, itemsize, trained, homes, want, again, kept)
            self.factors.append(Factor(place, self.place["op", user.name], table))

    def _kept_for(self, user: NamedNode, name: str) -> tuple[bool, bool]:
        """Whether an op keeps what is converted for it; whether the value itself is kept for no other."""
        if user.name in self.again:
            return False, False
        return (user.name, name) in self.kept.operands, self.kept.only_for(user.name, name)

    def _same(self, value: Any) -> Any:
        return self.known.setdefault(("same", value), value)

    def _produced(self, maker: int, position: int) -> tuple[Layout, ...]:
        options = self.variables[maker].states
        key = "produced", id(options), position
        if key not in self.known:
            self.known[key] = tuple(option.produced[position] for option in options)
        found: tuple[Layout, ...] = self.known[key]
        return found

    def _homes(
        self, tensor: NamedTensor, produced: tuple[Layout, ...], wants: Sequence[tuple[Wants, ...]]
    ) -> tuple[Layout, ...]:
        key = (
            "homes",
            self._cut(tensor),
            produced,
            tuple(wants),
            tuple(self.handed.get(tensor.name, ())),
            (self.demands.stored_token(tensor)),
        )
        if key not in self.known:
            found = dict.fromkeys(produced)
            found.update(dict.fromkeys(want for each in wants for one in each for want in one if want is not None))
            is_handed = tensor.name in self.handed
            if is_handed or self.demands.is_bound(tensor):
                found.update(dict.fromkeys(resolved for layout in produced for resolved in _resolved(layout)))
                found.update(dict.fromkeys(each for layout in produced for each in self.demands.closed(tensor, layout)))
            kept = [home for home in found if self.demands.value_agrees(tensor, home)]
            if is_handed:
                atoms = atoms_of(tensor)
                kept = [home for home in kept if can_be_held(home, atoms, self.setting.axes)]
            self.known[key] = tuple(kept)
        homes: tuple[Layout, ...] = self.known[key]
        return homes

    def _has_home(self, tensor: NamedTensor, node: NamedNode, demands: Demands) -> bool:
        """Whether a value can be kept as another layout demands, however it is taken."""
        position = node.outputs.index(tensor.name)
        options = options_of(self.setting, demands, node)
        found = [layout for option in options if (layout := option.produced[position]) is not None]
        found += [closed for layout in found for closed in demands.closed(tensor, layout)]
        atoms, is_handed = atoms_of(tensor), tensor.name in self.handed
        return any(
            demands.value_agrees(tensor, home) and (not is_handed or can_be_held(home, atoms, self.setting.axes))
            for home in found
        )

    def _home_parts(self, tensor: NamedTensor, homes: tuple[Layout, ...], users: int) -> Parts:
        again = self.makers[tensor.name][0].name in self.again
        kept = self.kept.is_kept(tensor.name) and not again
        key = "home", self._cut(tensor), homes, users, tuple(self.handed.get(tensor.name, ())), kept
        if key not in self.known:
            sums = np.zeros((len(Sum), len(homes)))
            for i, home in enumerate(homes):
                sums[Sum.KEPT_GIB, i] += self._gib(tensor.name, home) if kept else 0.0
                if tensor.requires_grad and self.setting.trains and users > 1:
                    self._added(sums[:, i], tensor.name, home, users - 1)
                self._handed_out(sums[:, i], tensor, home)
            self.known[key] = {part: sums[part] for part in Sum if sums[part].any()} or {Sum.DEVICE: sums[0]}
        parts: Parts = self.known[key]
        return parts


def _resolved(layout: Layout) -> list[Layout]:
    """What a sum may be brought into: whole, or split along one of its dims."""
    found = [Layout(layout.splits)]
    for axis in sorted(layout.partial):
        found = [
            made for one in found for made in (one, *(_with(one, place, axis) for place in range(len(layout.splits))))
        ]
    return found


def _with(layout: Layout, place: int, axis: str) -> Layout:
    return Layout(tuple((*axes, axis) if i == place else axes for i, axes in enumerate(layout.splits)))


def handed_out(graph: NamedGraph) -> dict[str, tuple[bool, ...]]:
    """Every tensor that the graph hands out; each time, whether it is written back as a whole."""
    flat: Any = graph.exported.graph_module.graph.output_node().args[0]
    by_node = {tensor.node: tensor.name for tensor in graph.tensors.values()}
    mutated = len(graph.exported.mutations)
    found: dict[str, tuple[bool, ...]] = {}
    for i, result in enumerate(flat):
        if isinstance(result, Node):
            name = by_node[result.name]
            found[name] = (*found.get(name, ()), i < mutated)
    return found
