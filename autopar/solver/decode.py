"""The plan that an assignment of the model stands for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.sharding.assignment import Assignment, OpAssignment, StepPlan
from autopar.sharding.layout.parameter_storage import GatherPolicy
from autopar.sharding.sharding import Sharding, atoms_of
from autopar.solver.candidates import OpSharding, StorageOption
from autopar.solver.model.model import Model

__all__ = ["plan_of"]


def plan_of(model: Model, chosen: Sequence[int]) -> StepPlan:
    """Everything that is decided, as the rewriter takes it."""
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
