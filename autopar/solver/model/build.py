"""Build the model of a graph on a mesh: variables and their costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from autopar.cost.compute.fusion import scaled, unfused_shares
from autopar.cost.compute.op_time import DirectionWork, OpWork, local_bytes
from autopar.cost.memory.local_memory import local_footprint
from autopar.ir.analysis.op_memory import Footprint
from autopar.ir.values import NamedNode
from autopar.sharding.assignment import Assignment, OpAssignment, StepPlan
from autopar.sharding.bound_layout import BoundLayout
from autopar.sharding.layout.parameter_storage import GatherPolicy
from autopar.sharding.layout.syntax import Recompute
from autopar.sharding.lowered_ops import lowered_context
from autopar.sharding.reshard_insertion import InsertedReshard
from autopar.sharding.sharding import Sharding, atoms_of
from autopar.solver import Floats
from autopar.solver.candidates import OpSharding, StorageOption, options_of
from autopar.solver.infeasible import no_option
from autopar.solver.model.builder import ModelBuilder, parts_of
from autopar.solver.model.cost_tables import CostTables, Parts
from autopar.solver.model.model import Model
from autopar.solver.model.objective import Sum
from autopar.solver.model.recompute_variables import RecomputeModes
from autopar.solver.model.reshard_sums import kept_early
from autopar.solver.model.storage_variables import StorageVariables, ValueVariables
from autopar.solver.search.joined_axes import AxisRoles
from autopar.solver.setting import PlanningProblem


class OpVariables(ModelBuilder):
    def _add_ops(self) -> None:
        options = {node.name: self._options(node) for node in self.graph.nodes}
        if self.setting.options.compiled:
            whole = {name: self._work(self.nodes[name], found[0]) for name, found in options.items()}
            self.shares = unfused_shares(self.graph, whole)
        for node in self.graph.nodes:
            self._heed_time()
            found = options[node.name]
            self._add_by_mode("op", node.name, found, node, partial(self._op_parts, node, found))

    def _signature(self, node: NamedNode) -> Any:
        """Return the key of a node; nodes with one key have the same options at the same costs."""
        found = self.signatures.get(node.name)
        if found is None:
            found = self.signatures[node.name] = self._same(self._signed(node))
        return found

    def _signed(self, node: NamedNode) -> Any:
        operands = tuple(None if name is None else self._cut(self.graph.tensors[name]) for name in node.operands)
        outputs = tuple(None if name is None else self._cut(self.graph.tensors[name]) for name in node.outputs)
        rule = self._text_of_rule(node)
        own = (node.op, rule, node.source, tuple(node.atoms.items()), tuple(node.sizes.items()), operands, outputs)
        return own, id(self.graph.footprints[node.node]), self.bound_layout.op_key(node)

    def _text_of_rule(self, node: NamedNode) -> str:
        key = "rule", id(node.rule)
        if key not in self.known:
            self.known[key] = (node.rule, str(node.rule))
        text: str = self.known[key][1]
        return text

    def _options(self, node: NamedNode) -> tuple[OpSharding, ...]:
        key = "options", self._signature(node)
        if key not in self.known:
            self._heed_time()
            self.known[key] = options_of(self.setting, self.bound_layout, node, self.ways)
        found: tuple[OpSharding, ...] = self.known[key]
        if not found:
            raise no_option(
                self.bound_layout, node, self.setting.axes, lambda other: bool(options_of(self.setting, other, node))
            )
        return found

    def _work(self, node: NamedNode, option: OpSharding) -> OpWork:
        op_assignment = OpAssignment(option.choice, option.operands, option.produced, option.produced)
        return self.setting.prices.work(node, op_assignment)

    def _op_parts(self, node: NamedNode, options: tuple[OpSharding, ...], mode: int) -> Parts:
        fused = self.shares.get(node.name)
        again, runs = self.again.flags(node.name)[mode], self.again.runs(node.name)[mode]
        # Shared values count where they are kept, and not at their producer; those of one op beside it.
        keeping = tuple(
            name
            if name is not None
            and not self._is_shared(name)
            and self._counts(name, node, mode)
            and not self._counts_at_user(name, mode)
            else None
            for name in node.outputs
        )
        moves = self.again.moves(node.name, mode)
        leaving = tuple(name is not None and self._leaves(name, node, mode) for name in keeping)
        keeps = self.regather and self.setting.trains and self.graph.trains(node) and not again
        moment = self._moment(node)
        kept = keeps, node.name in self.gone, tuple(name is not None for name in keeping), moves, leaving
        behind = node.name in self.behind, *(name is not None and self._is_behind(name) for name in keeping)
        reruns = self.regather and self._reruns(node, mode) and self.graph.trains(node)
        back = tuple(
            name is not None and not self._is_shared(name) and reruns and self._comes_back(name, node, mode)
            for name in node.outputs
        )
        key = "op", self._signature(node), fused, runs, moment, kept, behind, reruns, back
        if key not in self.known:
            once, more = self._computed(node, options, fused)
            sums = once + more if runs else once.copy()
            if keeps or reruns or moment is not None:
                self._add_held(sums, node, options, keeps, reruns, moment, moves)
            for i, option in enumerate(options):
                for position, name in enumerate(keeping):
                    layout = option.produced[position]
                    if name is not None and layout is not None:
                        self._add_kept(sums[:, i], self._gib(name, layout), leaving[position], behind[1 + position])
                for name, layout, is_back in zip(node.outputs, option.produced, back, strict=True):
                    if is_back and name is not None and layout is not None:
                        self._add_rerun(sums[:, i], self._gib(name, layout))
            if moves:
                sums[Sum.COPIES_FORWARD_ROOM] += once[Sum.FORWARD_ROOM]
                sums[Sum.COPIES_BACKWARD_ROOM] += once[Sum.BACKWARD_ROOM]
            self.known[key] = parts_of(sums)
        parts: Parts = self.known[key]
        return parts

    def _computed(self, node: NamedNode, options: tuple[OpSharding, ...], fused: float | None) -> tuple[Floats, Floats]:
        """Return seconds of computing and of messages inside the op for each option, and what recomputation adds."""
        key = "computed", self._signature(node), fused
        if key not in self.known:
            once, more = np.zeros((2, len(Sum), len(options)))
            for i, option in enumerate(options):
                work = self._work(node, option)
                if fused is not None:
                    device = self.setting.cluster.device
                    work = OpWork(scaled(work.forward, fused, device), scaled(work.backward, fused, device))
                self._add_work(once[:, i], work.forward, Sum.FORWARD_ROOM)
                self._add_work(more[:, i], work.forward, Sum.BACKWARD_ROOM)
                if self.setting.trains:
                    self._add_work(once[:, i], work.backward, Sum.BACKWARD_ROOM)
                self._sent_inside(once[:, i], more[:, i], node, option, work)
            self.known[key] = once, more
        found: tuple[Floats, Floats] = self.known[key]
        return found

    def _add_held(
        self,
        sums: Floats,
        node: NamedNode,
        options: tuple[OpSharding, ...],
        keeps: bool,
        reruns: bool,
        moment: Sum | None,
        moves: bool,
    ) -> None:
        """Add the memory of each option: saved tensors beside values, and gradients at its backward."""
        for i, (option, footprint) in enumerate(zip(options, self._footprints(node, options), strict=True)):
            inside = footprint.internal_bytes / 2**30 if keeps else 0.0
            if inside:
                self._add_kept(sums[:, i], inside, moves, node.name in self.behind)
            if reruns:
                self._add_rerun(sums[:, i], footprint.internal_bytes / 2**30)
            sums[Sum.PRODUCT_GIB, i] -= self.setting.saved_share * inside if node.name in self.gone else 0.0
            if moment is not None:
                sums[moment, i] += self._gradients_gib(node, option, footprint)

    def _footprints(self, node: NamedNode, options: tuple[OpSharding, ...]) -> list[Footprint]:
        key = "footprints", self._signature(node)
        if key not in self.known:
            found = []
            for option in options:
                split = lowered_context(self.graph, node, option.choice.splits, option.operands, self.setting.axes)
                one_rank = OpAssignment(option.choice, option.operands, option.produced, option.produced)
                found.append(local_footprint(self.graph, node, one_rank, split, self.setting.axes))
            self.known[key] = found
        footprints: list[Footprint] = self.known[key]
        return footprints

    def _moment(self, node: NamedNode) -> Sum | None:
        """Return the memory sum that the gradients of an op belong to."""
        if self.regather and node is self.beginning:
            return Sum.BEGINNING_GIB
        return Sum.PRODUCT_GIB if self.regather and node is self.product else None

    def _gradients_gib(self, node: NamedNode, option: OpSharding, footprint: Footprint) -> float:
        """Return the memory of an op's backward: gradients of results and operands, and its workspace."""
        named = [*zip(node.outputs, option.produced, strict=True)]
        named += [
            (name, layout)
            for i, (name, layout) in enumerate(zip(node.operands, option.operands, strict=True))
            if i not in footprint.passes
        ]
        gradients = sum(
            self._gib(name, layout)
            for name, layout in dict.fromkeys(named)
            if name is not None and layout is not None and self.graph.tensors[name].requires_grad
        )
        return gradients + footprint.backward_bytes / 2**30

    def _add_work(self, sums: Floats, work: DirectionWork, room: Sum) -> None:
        sums[Sum.DEVICE] += work.seconds
        sums[room] += work.seconds
        sums[Sum.HOST] += work.launches * self.setting.prices.launch if work.seconds else 0.0

    def _sent_inside(self, once: Floats, more: Floats, node: NamedNode, option: OpSharding, work: OpWork) -> None:
        """Add the messages inside an op, and those of its recomputation."""
        split = lowered_context(self.graph, node, option.choice.splits, option.operands, self.setting.axes)
        for message in split.messages() if split is not None else ():
            one = InsertedReshard.of_message(node, message)
            forward = tuple(self.setting.prices.message(one, "forward", work))
            backward = tuple(self.setting.prices.message(one, "backward", work) if self.setting.trains else ())
            for sums, tasks in ((once, (*forward, *backward)), (more, forward)):
                for task in tasks:
                    sums[Sum.DEVICE] += task.seconds
                    sums[Sum.HOST] += task.host_seconds


def build(
    setting: PlanningProblem,
    bound_layout: BoundLayout,
    tables: CostTables | None = None,
    regather: bool = False,
    recompute: Mapping[str, Recompute] | None = None,
    ways: AxisRoles | None = None,
    open_layers: Sequence[str] = (),
    deadline: float = math.inf,
    has_shared_states: bool = True,
) -> Model:
    """Return the model.

    `regather` allows gathering parameters again in the backward, which saves memory and never time. `recompute` fixes
    the recomputation of layers, `open_layers` names those to decide here. `ways` restricts the choices of ops.
    `has_shared_states` lets a parameter be resharded once for several ops. Raise `OutOfTime` after `deadline`.
    """
    tables = tables or CostTables(setting)
    settled = dict(recompute or {})
    layers = open_layers if setting.trains else ()
    modes = setting.modes if layers else ()
    again = RecomputeModes.of(setting.graph, setting.options, settled, layers, setting.trains, modes)
    builder = _GraphModelBuilder(setting, bound_layout, tables, regather, again, ways, deadline, has_shared_states)
    return builder.run(settled)


class _GraphModelBuilder(OpVariables, StorageVariables, ValueVariables):
    def run(self, settled: Mapping[str, Recompute]) -> Model:
        self._add_ops()
        for tensor in self.graph.tensors.values():
            self._heed_time()
            if tensor.kind == "activation":
                self._value(tensor)
            else:
                self._held(tensor)
        return Model(self.setting, tuple(self.variables), tuple(self.factors), self.place, settled, self.tables)


# -- decoding ----------------------------------------------------------------------------------------------------------


def plan_of(model: Model, chosen: Sequence[int]) -> StepPlan:
    """Return the plan of an assignment of the model's variables."""
    setting = model.setting
    states = {
        (variable.kind, variable.name): variable.states[state]
        for variable, state in zip(model.variables, chosen, strict=True)
    }
    homes = {name: home for (kind, name), home in states.items() if kind == "value"}
    ops: dict[str, OpAssignment] = {}
    values: dict[str, Sharding] = {}
    for node in setting.graph.nodes:
        option: OpSharding = states["op", node.name]
        results: list[Sharding | None] = []
        for name, produced in zip(node.outputs, option.produced, strict=True):
            home = produced
            if name is not None and produced is not None:
                home = _home(model, states, node.name, name, homes.get(name, produced))
            results.append(home)
            if name is not None and home is not None:
                values[name] = home
        ops[node.name] = OpAssignment(option.choice, option.operands, option.produced, tuple(results))
    held: dict[str, StorageOption] = {name: one for (kind, name), one in states.items() if kind == "held"}
    gather_policies: dict[str, GatherPolicy] = {}
    stored: dict[str, Sharding] = {}
    for name, one in held.items():
        stored[name] = values[name] = one.layout
        if setting.graph.tensors[name].kind == "param":
            values[name] = _first_use(model, ops, name) or one.layout
            deferred = one.lasting or values[name].splits == one.layout.splits
            gather_policies[name] = GatherPolicy(one.lasting, deferred, one.again)
    modes = {name: mode for (kind, name), mode in states.items() if kind == "recompute"}
    recompute = {**model.recompute, **{path: mode for path, mode in modes.items() if mode != "none"}}
    assignment = Assignment(setting.axes, stored, ops, values, gather_policies, recompute=recompute)
    return StepPlan(setting.graph.fingerprint, assignment).with_options(setting.options)


def _home(model: Model, states: Mapping[tuple[str, str], Any], maker: str, name: str, home: Sharding) -> Sharding:
    """Return the sharding in which a value is kept: partial sums are added up early where all users take the sum."""
    setting = model.setting
    users = setting.users.get(name, ()) if home.partial else ()
    if not all(setting.shares_layer(maker, user.name) for user in users):
        return home
    wanted = {
        want
        for user in users
        for operand, want in zip(user.operands, states["op", user.name].operands, strict=True)
        if operand == name and want is not None
    }
    if len(wanted) != 1:
        return home
    (want,) = wanted
    place = model.place.get(("value", name))

    def size(layout: Sharding) -> float:
        return local_bytes(setting.graph, name, layout, setting.axes)

    allowed = place is None or want in model.variables[place].states
    return want if allowed and kept_early(home, want, size) else home


def _first_use(model: Model, ops: Mapping[str, OpAssignment], name: str) -> Sharding | None:
    for node in model.setting.users.get(name, ())[:1]:
        pairs = zip(node.operands, ops[node.name].operands, strict=True)
        return next((layout for operand, layout in pairs if operand == name), None)
    return Sharding.replicated(atoms_of(model.setting.graph.tensors[name]))
