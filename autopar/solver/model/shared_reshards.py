"""Tensors of several ops: `evaluate` counts one reshard for all ops that take a tensor in one sharding."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autopar.ir.values import NamedNode, NamedTensor
from autopar.sharding.sharding import Sharding
from autopar.solver import Floats
from autopar.solver.model.builder import returned_as, returned_tensors
from autopar.solver.model.cost_tables import CostTables, Parts, ValueUse
from autopar.solver.model.model import Factor, FactorByMode, Model
from autopar.solver.model.objective import MEMORY, Sum
from autopar.solver.model.recompute_variables import RecomputeModes, last_of

__all__ = [
    "SharedTensor",
    "TensorUse",
    "allowed_parts",
    "modes_of",
    "reshard_parts",
    "returned_from",
    "shared_tensors",
    "sum_parts",
    "sums_of_column",
]


@dataclass(frozen=True, eq=False)
class TensorUse:
    """Use of a tensor by one op."""

    # Variable of the op.
    place: int
    # Number of the factor with the cost of its reshard; None if none costs anything.
    factor: int | None
    # The op is recomputed, for each mode of its layer.
    again: tuple[bool, ...]
    # It saves the tensor, and does so on the host, for each mode.
    saves: tuple[bool, ...]
    moves: tuple[bool, ...]
    # It is behind the last layer: what it saves is gone when that is recomputed.
    is_behind: bool
    # The shardings in which it takes the tensor, for each of its options.
    wants: tuple[frozenset[Sharding], ...]


@dataclass(frozen=True, eq=False)
class SharedTensor:
    """Tensor of several ops, and its uses in their order."""

    tensor: NamedTensor
    place: int
    uses: tuple[TensorUse, ...]
    # Its ops are in one layer whose mode is open; so is the op that makes it.
    is_in_layer: bool
    is_made_in_layer: bool
    # The layer of that op, if its mode is open.
    layer_of_maker: str | None
    # The shardings in which the step returns it, for each of its states. The state pays for these reshards.
    returned: tuple[frozenset[Sharding], ...]

    @property
    def wants(self) -> tuple[Sharding, ...]:
        """Return the shardings that several ops may take, or one and the caller of the step."""
        counts: dict[Sharding, int] = defaultdict(int)
        for taken in (*(use.wants for use in self.uses), self.returned):
            for want in dict.fromkeys(want for each in taken for want in each):
                counts[want] += 1
        return tuple(want for want, count in counts.items() if count > 1)


def shared_tensors(model: Model) -> Iterator[SharedTensor]:
    """Yield the tensors with a variable of their own that several ops take, or one and the caller of the step."""
    graph, again = model.setting.graph, modes_of(model)
    handed = returned_tensors(graph, model.setting.options.outputs)
    _, behind = last_of(graph, again.open)
    numbers: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, factor in enumerate(model.factors):
        numbers[factor.scope[-2:]].append(number)
    makers = {name: node.name for node in graph.nodes for name in node.outputs}
    for tensor in graph.tensors.values():
        users = model.setting.users.get(tensor.name, ())
        place = model.place.get(("value" if tensor.kind == "activation" else "held", tensor.name))
        if place is None or len(users) + (tensor.name in handed) < 2:
            continue
        uses = []
        for user in users:
            op = model.place["op", user.name]
            costly = [number for number in numbers[place, op] if _is_costly(model.factors[number])]
            assert len(costly) < 2, f"{tensor.name} is resharded once for {user.name}"
            wants = _wants(model, user, tensor.name)
            is_kept = (user.name, tensor.name) in model.setting.kept.operands
            saves = tuple(is_kept and not flag for flag in again.flags(user.name))
            moves = tuple(again.moves(user.name, mode) for mode in range(len(saves)))
            is_behind = user.name in behind
            uses.append(TensorUse(op, next(iter(costly), None), again.takes(user.name), saves, moves, is_behind, wants))
        layers = {again.layers.get(user.name) for user in users}
        returned = returned_from(model, tensor, handed.get(tensor.name, ()))
        is_in_layer = len(layers) == 1 and None not in layers
        of_maker = again.layers.get(makers.get(tensor.name, ""))
        yield SharedTensor(
            tensor, place, tuple(uses), is_in_layer, is_in_layer and of_maker in layers, of_maker, returned
        )


def returned_from(model: Model, tensor: NamedTensor, wholes: Sequence[bool]) -> tuple[frozenset[Sharding], ...]:
    """Return the shardings in which a value is resharded for the caller of the step, for each of its states."""
    states = model.variables[model.place["value" if tensor.kind == "activation" else "held", tensor.name]].states
    if not wholes or tensor.kind == "param":
        return (frozenset(),) * len(states)
    layouts = states if tensor.kind == "activation" else [one.layout for one in states]
    outputs = model.setting.options.outputs
    return tuple(frozenset(returned_as(outputs, tensor, one, wholes)) - {one} for one in layouts)


def _wants(model: Model, op: NamedNode, tensor: str) -> tuple[frozenset[Sharding], ...]:
    """Return the shardings in which an op takes a tensor, for each of its options."""
    at = [i for i, operand in enumerate(op.operands) if operand == tensor]
    options = model.variables[model.place["op", op.name]].states
    return tuple(frozenset(option.operands[i] for i in at) - {None} for option in options)


def modes_of(model: Model) -> RecomputeModes:
    """Return the recompute modes that a model decides, or has fixed."""
    layers = [variable for variable in model.variables if variable.kind == "recompute"]
    names, states = [one.name for one in layers], layers[0].states if layers else ()
    setting = model.setting
    return RecomputeModes.of(setting.graph, setting.options, model.recompute, names, setting.trains, states)


def reshard_parts(
    tables: CostTables, tensor: NamedTensor, held: Sequence[Any], wants: Sequence[Sharding], again: bool, later: bool
) -> Parts:
    """Return the sums of the reshards from each state of a tensor to each sharding, without those of memory.

    Of a value, `again` counts its forward twice. Of a parameter, `later` is as in `ParameterUse`.
    """
    cut = tables.cut(tensor)
    if tensor.kind != "param":
        sources = tuple(held) if tensor.kind == "activation" else tuple(one.layout for one in held)
        use = ValueUse(again, share=tables.setting.prices.share(tensor.name))
        table = tables.values(cut, sources, tuple((want,) for want in wants), use)
        at = np.ix_(table.rows, table.columns)
        return {key: values[at] for key, values in table.parts.items() if key not in MEMORY}
    sums = np.zeros((len(Sum), len(held), len(wants)))
    gathered = tables.handled(tensor, kept=False).gathered
    for i, one in enumerate(held):
        for j, want in enumerate(wants):
            if want != one.shared:
                tables.ways.add_moved(sums[:, i, j], cut, replace(one, shared=None), want, gathered, later)
    return {key: sums[key] for key in Sum if sums[key].any() and key not in MEMORY}


def sum_parts(tables: CostTables, tensor: NamedTensor, held: Sequence[Any], wants: Sequence[Sharding]) -> Parts:
    """Return by how much more it costs to add two gradients of a value in each sharding than in each of its states.

    The gradients of ops that share a reshard are added before the reshard back, the others as the value is kept. All
    ops but one count as if they added theirs as it is kept.
    """
    setting = tables.setting
    sums = np.zeros((len(Sum), len(held), len(wants)))
    if tensor.kind == "activation" and tensor.requires_grad and setting.trains:
        kept, taken = ([setting.prices.gradient_sum(tensor.name, one) for one in each] for each in (held, wants))
        seconds = np.subtract.outer([-task.seconds for task in kept], [-task.seconds for task in taken])
        sums[[Sum.DEVICE, Sum.BACKWARD_ROOM]] = seconds
        sums[Sum.HOST] = np.subtract.outer([-t.host_seconds for t in kept], [-t.host_seconds for t in taken])
    return {key: sums[key] for key in Sum if sums[key].any()}


def allowed_parts(parts: Parts) -> Parts:
    """Return all sums but the number of what is forbidden."""
    return {key: values for key, values in parts.items() if key is not Sum.FORBIDDEN}


def sums_of_column(parts: Parts, count: int) -> Floats:
    """Return the sums of tables of one column: a column for each of the `count` states of a tensor."""
    sums = np.zeros((len(Sum), count))
    for key, values in parts.items():
        sums[key] = values[:, 0]
    return sums


def _is_costly(factor: Factor) -> bool:
    each = factor.table.each if isinstance(factor.table, FactorByMode) else (factor.table,)
    return any(values.any() for table in each for key, values in table.parts.items() if key is not Sum.FORBIDDEN)
