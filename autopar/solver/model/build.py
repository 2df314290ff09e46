"""Build the model of a graph on a mesh: variables and their costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from autopar.sharding.assignment import Assignment, OpAssignment, StepPlan
from autopar.sharding.bound_layout import BoundLayout
from autopar.sharding.layout.parameter_storage import GatherPolicy
from autopar.sharding.options import Recompute
from autopar.sharding.sharding import Sharding, atoms_of
from autopar.solver.candidates import OpSharding, StorageOption
from autopar.solver.model.cost_tables import CostTables
from autopar.solver.model.model import Model
from autopar.solver.model.op_variables import OpVariables
from autopar.solver.model.recompute_variables import RecomputeModes
from autopar.solver.model.storage_variables import StorageVariables, ValueVariables
from autopar.solver.search.joined_axes import AxisRoles
from autopar.solver.setting import PlanningProblem

__all__ = ["build", "plan_of"]


def build(
    setting: PlanningProblem,
    bound_layout: BoundLayout,
    tables: CostTables | None = None,
    regather: bool = False,
    recompute: Mapping[str, Recompute] | None = None,
    ways: AxisRoles | None = None,
    open_layers: Sequence[str] = (),
    deadline: float = math.inf,
    lasting: bool = False,
) -> Model:
    """Return the model.

    `regather` allows gathering parameters again in the backward, which saves memory and never time. `lasting` allows
    keeping gathered parameters until the optimizer steps; with one micro-batch it saves host time only. `recompute`
    fixes the recomputation of layers, `open_layers` names those to decide here. `ways` restricts the choices of ops.
    Raise `OutOfTime` after `deadline`.
    """
    tables = tables or CostTables(setting)
    settled = dict(recompute or {})
    again = RecomputeModes.of(setting.graph, settled, open_layers if setting.trains else (), setting.trains)
    return _GraphModelBuilder(setting, bound_layout, tables, regather, again, ways, deadline, lasting).run(settled)


class _GraphModelBuilder(OpVariables, StorageVariables, ValueVariables):
    def run(self, settled: Mapping[str, Recompute]) -> Model:
        self._add_ops()
        for tensor in self.graph.tensors.values():
            self._heed_time()
            if tensor.kind == "activation":
                self._value(tensor)
            else:
                self._held(tensor)
        return Model(self.setting, tuple(self.variables), tuple(self.factors), self.place, settled)


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
            home = produced if name is None else homes.get(name, produced)
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


def _first_use(model: Model, ops: Mapping[str, OpAssignment], name: str) -> Sharding | None:
    for node in model.setting.users.get(name, ())[:1]:
        pairs = zip(node.operands, ops[node.name].operands, strict=True)
        return next((layout for operand, layout in pairs if operand == name), None)
    return Sharding.replicated(atoms_of(model.setting.graph.tensors[name]))
