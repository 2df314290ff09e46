"""Contracts of a layout (`forbid`, `same`, halo limits), as far as single states and pairs of states break them.

A guard forbids a collective of some tensors over some axes. A pair of shardings fixes the collectives of a reshard, an
option fixes those inside its op. Pairs and options that break a guard or pass a halo limit are forbidden, and so are
different shardings of two tensors that must share one. A forbidden state costs more than any plan, so the search takes
it only if nothing else is feasible, and reports that.

Two values that must share a sharding have a variable each. The final plan is checked once more.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from autopar.ir.values import NamedNode, NamedTensor
from autopar.sharding.bound_layout import BoundLayout
from autopar.sharding.contracts import exceeds_halo, is_guarded, sharding_text
from autopar.sharding.layout.matching import glob_matches
from autopar.sharding.layout.syntax import Contract, Guard, Limit, Same
from autopar.sharding.lowered_ops import lowered_context
from autopar.sharding.sharding import Sharding, atoms_of
from autopar.solver import Floats
from autopar.solver.model.builder import returned_tensors
from autopar.solver.model.cost_tables import CostTable, CostTables, Parts
from autopar.solver.model.model import Factor, Model, Variable
from autopar.solver.model.objective import Sum
from autopar.solver.model.reshard_sums import TensorCut

__all__ = ["forbid_broken"]

# A forbidden collective of a tensor: direction, collective, axes.
Broken = tuple[tuple[str, str, frozenset[str]], ...]


def forbid_broken(model: Model, bound_layout: BoundLayout, tables: CostTables) -> Model:
    """Return the model with the states and pairs that break a contract forbidden."""
    statements = bound_layout.given.statements
    if not any(isinstance(one, Contract) for one in statements):
        return model
    return _Contracts(model, bound_layout, tables).run()


@dataclass
class _Contracts:
    model: Model
    bound_layout: BoundLayout
    tables: CostTables
    known: dict[Hashable, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.setting = self.model.setting
        self.graph = self.setting.graph
        given = self.bound_layout.given
        self.guards = [one for one in given if isinstance(one, Guard) and one.action == "forbid"]
        self.halos = [one for one in given if isinstance(one, Limit) and one.quantity == "halo"]
        self.factors = list(self.model.factors)
        self.alone: dict[int, Floats] = {}

    def run(self) -> Model:
        for node in self.graph.nodes:
            self._inside(node)
        for tensor in self.graph.tensors.values():
            broken = self._broken(tensor)
            if broken:
                self._forbid_reshards(tensor, broken)
        for statement in self.bound_layout.given:
            if isinstance(statement, Same):
                self._same(statement)
        variables = tuple(self._with(place, one) for place, one in enumerate(self.model.variables))
        return replace(self.model, variables=variables, factors=tuple(self.factors))

    def _with(self, place: int, variable: Variable) -> Variable:
        if place not in self.alone or not self.alone[place].any():
            return variable
        values = self.alone[place]
        key = "alone", values.tobytes()
        parts: Parts = self.known.setdefault(key, {Sum.FORBIDDEN: values})
        return replace(variable, parts=(*variable.parts, parts))

    def _add(self, place: int, counts: Floats) -> None:
        self.alone[place] = self.alone.get(place, np.zeros(len(counts))) + counts

    def _broken(self, tensor: NamedTensor) -> Broken:
        return tuple(
            (way, guard.collective, frozenset(guard.axes))
            for guard in self.guards
            for way in ("forward", "backward")
            if is_guarded(guard, tensor, self.graph, way)
        )

    # -- ops

    def _inside(self, node: NamedNode) -> None:
        """Yield the collectives inside an op, under the name of the operand that is sent."""
        broken = [() if name is None else self._broken(self.graph.tensors[name]) for name in node.operands]
        if not any(broken) and not self.halos:
            return
        place = self.model.place["op", node.name]
        counts = np.zeros(len(self.model.variables[place].states))
        for i, option in enumerate(self.model.variables[place].states):
            split = lowered_context(self.graph, node, option.choice.splits, option.operands, self.setting.axes)
            if split is None:
                continue
            for message in split.messages():
                there, back = message.reshard.forward, message.reshard.backward if message.differentiable else ()
                for way, steps in (("forward", there), ("backward", back)):
                    sent = [(step.kind.value, frozenset(step.axes)) for step in steps if not step.local]
                    counts[i] += _count(broken[message.operand], way, sent)
            counts[i] += sum(exceeds_halo(limit, split) for limit in self.halos)
        if counts.any():
            self._add(place, counts)

    # -- reshards

    def _forbid_reshards(self, tensor: NamedTensor, broken: Broken) -> None:
        model, name = self.model, tensor.name
        place = model.place.get(("held" if tensor.kind != "activation" else "value", name))
        if tensor.kind == "activation":
            node = next(node for node in self.graph.nodes if name in node.outputs)
            maker, position = model.place["op", node.name], node.outputs.index(name)
            sources = [option.produced[position] for option in model.variables[maker].states]
            if place is None:
                place = maker
            else:
                homes = list(model.variables[place].states)
                self._pairs(tensor, broken, maker, sources, place, [(home,) for home in homes])
                sources = homes
        else:
            assert place is not None, name
            sources = [one.layout for one in model.variables[place].states]
        for user in self.setting.users.get(name, ()):
            self._pairs(tensor, broken, place, sources, model.place["op", user.name], _wants(model, user, name))
        whole = Sharding.replicated(atoms_of(tensor))
        if tensor.kind == "input" and not self.setting.options.local_inputs:
            self._add(place, np.array([self._breaks(tensor, broken, whole, source) for source in sources]))
        for is_whole in dict.fromkeys(returned_tensors(self.graph, self.setting.options.outputs).get(name, ())):
            everything = is_whole or self.setting.options.outputs == "full" or not tensor.shape
            ends = [whole if everything else Sharding(source.splits) for source in sources]
            pairs = zip(sources, ends, strict=True)
            self._add(place, np.array([self._breaks(tensor, broken, source, end) for source, end in pairs]))

    def _pairs(
        self,
        tensor: NamedTensor,
        broken: Broken,
        first: int,
        sources: Sequence[Sharding],
        second: int,
        wants: Sequence[tuple[Sharding, ...]],
    ) -> None:
        key = atoms_of(tensor), tensor.requires_grad, broken, tuple(sources), tuple(wants)
        if key not in self.known:
            counts = np.array(
                [
                    [sum(self._breaks(tensor, broken, source, want) for want in each) for each in wants]
                    for source in sources
                ]
            )
            self.known[key] = _table(counts)
        table: CostTable | None = self.known[key]
        if table is not None:
            self.factors.append(Factor((first, second), table))

    def _breaks(self, tensor: NamedTensor, broken: Broken, source: Sharding, want: Sharding) -> float:
        """Return how often a reshard breaks a guard."""
        cut = TensorCut.of(tensor, self.tables.setting)
        key = "breaks", cut, tensor.requires_grad, broken, source, want
        if key not in self.known:
            routes = self.tables.ways.routes
            ways = {"forward": cut.steps(routes, source.value, want.value)}
            if tensor.requires_grad:
                ways["backward"] = cut.steps(routes, want.gradient.value, source.gradient.value)
            self.known[key] = sum(
                _count(broken, way, [(leg.kind, frozenset(leg.axes)) for leg in legs or () if not leg.local])
                for way, legs in ways.items()
            )
        return float(self.known[key])

    # -- tensors that share one layout

    def _same(self, same: Same) -> None:
        """Add factors between the first tensor of a `same` and the others; check tensors without a variable."""
        names = [name for name in self.graph.tensors if glob_matches(same.left, name) or glob_matches(same.right, name)]
        keys = (("value" if self.graph.tensors[name].kind == "activation" else "held", name) for name in names)
        places = [place for place in map(self.model.place.get, keys) if place is not None]
        for place in places[1:]:
            first, other = (self._texts(each) for each in (places[0], place))
            table = _table(np.array([[float(one != two) for two in other] for one in first]))
            if table is not None:
                self.factors.append(Factor((places[0], place), table))

    def _texts(self, place: int) -> list[str]:
        variable = self.model.variables[place]
        tensor = self.graph.tensors[variable.name]
        return [sharding_text(tensor, one if variable.kind == "value" else one.layout) for one in variable.states]


def _wants(model: Model, user: NamedNode, name: str) -> tuple[tuple[Sharding, ...], ...]:
    positions = [i for i, operand in enumerate(user.operands) if operand == name]
    options = model.variables[model.place["op", user.name]].states
    taken = (dict.fromkeys(option.operands[i] for i in positions) for option in options)
    return tuple(tuple(want for want in each if want is not None) for each in taken)


def _count(broken: Broken, way: str, sent: Sequence[tuple[str, frozenset[str]]]) -> int:
    return sum(
        own == way and collective == kind and axes <= over for own, collective, axes in broken for kind, over in sent
    )


def _table(counts: Floats) -> CostTable | None:
    if not counts.any():
        return None
    rows, columns = (np.arange(size, dtype=np.int64) for size in counts.shape)
    return CostTable({Sum.FORBIDDEN: counts}, rows, columns)
