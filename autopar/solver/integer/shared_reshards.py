"""Reshards that several ops share: `evaluate` counts one where the factors of the model count one for each op."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from autopar.ir.values import NamedNode, NamedTensor
from autopar.sharding.sharding import Sharding
from autopar.solver import Floats
from autopar.solver.integer.formulation import Entries, Formulation
from autopar.solver.integer.program import IndexBlock
from autopar.solver.model.builder import returned_tensors
from autopar.solver.model.model import Model
from autopar.solver.model.objective import Sum
from autopar.solver.model.recompute_variables import RecomputeModes
from autopar.solver.model.shared_reshards import (
    allowed_parts,
    modes_of,
    reshard_parts,
    returned_from,
    sum_parts,
    sums_of_column,
)

__all__ = ["add_shared_reshards"]


def add_shared_reshards(made: Formulation) -> None:
    """Add z for each tensor of several ops, and move the costs of its reshards from y to z.

    The costs of z are those of a reshard that is not recomputed, if one of its ops may be so. Memory is not moved:
    it counts for each op, as in the model. Ops that take a value in one sharding add their gradients in it: the
    difference to a sum in the kept sharding stays with y, and z takes off that of one op.
    """
    model = made.model
    by_scope: dict[tuple[int, ...], list[Entries]] = defaultdict(list)
    for entries in made.tables:
        sums = made.sums[entries.block.start]
        if sums[[key for key in Sum if key is not Sum.FORBIDDEN]].any():
            by_scope[entries.factor.scope[-2:]].append(entries)
    again, handed = modes_of(model), returned_tensors(model.setting.graph, model.setting.options.outputs)
    for tensor in model.setting.graph.tensors.values():
        users = model.setting.users.get(tensor.name, ())
        place = model.place.get(("value" if tensor.kind == "activation" else "held", tensor.name))
        if place is not None and len(users) + (tensor.name in handed) > 1:
            held_states = model.variables[place].states
            uses = [
                _Use.of(model, tensor, user, number, entries, again)
                for number, user in enumerate(users)
                for entries in by_scope.get((place, model.place["op", user.name]), ())
            ]
            returned = dict(zip(held_states, returned_from(model, tensor, handed.get(tensor.name, ())), strict=True))
            _add_for_tensor(made, tensor, place, returned, uses)


@dataclass(frozen=True, eq=False)
class _Use:
    """Use of a tensor by one op in one mode of a layer."""

    # Position of the op among the users.
    number: int
    entries: Entries
    # The shardings in which the op takes the tensor, for each column of the table.
    wants: tuple[frozenset[Sharding], ...]
    # A recompute brings it to the op once more.
    again: bool

    @staticmethod
    def of(
        model: Model, tensor: NamedTensor, user: NamedNode, number: int, entries: Entries, again: RecomputeModes
    ) -> _Use:
        options = model.variables[entries.factor.scope[-1]].states
        at = [i for i, name in enumerate(user.operands) if name == tensor.name]
        taken = [{options[column].operands[i] for i in at} for column in entries.columns.tolist()]
        flags = again.takes(user.name)
        return _Use(
            number, entries, tuple(frozenset(each - {None}) for each in taken), flags[entries.mode % len(flags)]
        )


def _add_for_tensor(
    made: Formulation,
    tensor: NamedTensor,
    place: int,
    returned: Mapping[Any, frozenset[Sharding]],
    uses: Sequence[_Use],
) -> None:
    """Add z for each sharding that several ops may take: a column for each sharding that the tensor may be kept in.

    `returned` has what each kept sharding pays for anyway, as the step returns the tensor so.
    """
    held = list(returned)
    takers: dict[Sharding, list[_Use]] = defaultdict(list)
    for use in uses:
        for want in frozenset[Sharding]().union(*use.wants):
            takers[want].append(use)
    states = made.model.variables[place].states
    number_of = {one: i for i, one in enumerate(held)}
    for number, (want, own) in enumerate(takers.items()):
        paid = np.array([want in returned[one] for one in held])
        several = len({use.number for use in own}) > 1
        if not several and not paid.any():
            continue

        @cache
        def price(again: bool, later: bool, want: Sharding = want) -> Floats:
            parts = reshard_parts(made.model.cost_tables, tensor, held, (want,), again, later)
            return sums_of_column(allowed_parts(parts), len(held))

        summed = sums_of_column(sum_parts(made.model.cost_tables, tensor, held, (want,)), len(held)) * several
        least = np.where(paid, 0.0, price(all(use.again for use in own), True)) - summed
        costly = np.flatnonzero(least.any(axis=0) & several)
        name = f"shared.{tensor.name}&{number}"
        z = made.add_priced(name, least[:, costly], allowed=True) if len(costly) else None
        place_of = np.full(len(held), -1)
        if z is not None:
            place_of[costly] = z.ids
        # z is 1 if an op takes the sharding, and where that costs less than nothing only then.
        upper: IndexBlock | None = None
        if z is not None and (least[[Sum.DEVICE, Sum.HOST]][:, costly] < 0.0).any():
            upper = made.builder.add_rows(f"{name}.taken", z.count, -np.inf, 0.0)
            made.builder.add(upper.ids, z.ids, 1.0)
        rows: dict[int, IndexBlock] = {}
        for use in own:
            kept_in = np.array([number_of[states[row]] for row in use.entries.rows.tolist()])
            at = np.flatnonzero((place_of[kept_in] >= 0) | paid[kept_in])
            columns = np.flatnonzero([want in each for each in use.wants])
            sums = made.sums[use.entries.block.start].reshape(len(Sum), *use.entries.ids.shape)
            sums[:, at[:, None], columns] -= (price(use.again, use.number > 0) - summed)[:, kept_in[at], None]
            if z is None:
                continue
            at = at[place_of[kept_in[at]] >= 0]
            if use.number not in rows:
                rows[use.number] = made.builder.add_rows(f"{name}.{use.number}", z.count, 0.0, np.inf)
                made.builder.add(rows[use.number].ids, z.ids, 1.0)
            numbers = place_of[kept_in[at]] - z.start
            taken = use.entries.ids[np.ix_(at, columns)]
            made.builder.add((rows[use.number].start + numbers)[:, None], taken, -1.0)
            if upper is not None:
                made.builder.add((upper.start + numbers)[:, None], taken, -1.0)
