"""The model of one mesh as an integer linear program.

Sets
    N: the variables of the model (ops, stored tensors, shared values, layers), each with states S(n)    `Model`
    F: its factors: of a reshard a table with a row for each distinct sharding of the value and a
        column for each sharding that the op takes                                                     `Model.factors`
    M(n): the recompute modes of the layer of n; one where no mode is open                             `_layer_mode`
    K: the sums of the objective: seconds of devices, of the host, of links; memory                    `Sum`
    H: the hinges of the objective                                                                     `Hinges`

Variables
    x[n, m, s] binary: n takes state s, and its layer mode m                                       `_add_states`
    y[f, m, r, c] in [0, 1]: the variables of f take row r and column c, the layer mode m          `_add_table`
    z[t, r, w] in [0, 1]: the tensor t, kept in r, is resharded to w for some op                   `add_shared_reshards`
    total[k] free: the sum k; beside[h] ≥ 0: the hinge h                                           `_add_objective`

Constraints
    Σ over s of x[n, m, s] = x[layer of n, m]; without a layer the sum is 1                        `_add_states`
    Σ over c of y[f, m, r, c] = Σ of x[first of f, m, s] over states s of row r; so for columns    `_add_side`
    y = 0 where no steps lead from r to c, or where a contract of the layout is broken             `_add_table`
    z[t, r, w] ≥ Σ of y[f, ·, r, c] over columns c with w; f: the factor of an op that takes t     `add_shared_reshards`
    total[k] = Σ costs of x, y, z; beside[h] ≥ slopes[h] · total + offset[h]                       `_add_objective`
    memory at each limited moment of a step ≤ the limit                                            `_add_objective`

Objective: minimise base · total + Σ beside + constant                                             `_add_objective`

With x whole y follows, so x alone is declared integer. A factor has a row for each distinct sharding and not for each
state. Its relaxation is that of the local polytope, at a fraction of the size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.errors import AutoparError
from autopar.solver import Floats, Ints
from autopar.solver.integer.formulation import Entries, FormulatedModel, Formulation
from autopar.solver.integer.program import IndexBlock
from autopar.solver.integer.shared_reshards import add_shared_reshards
from autopar.solver.model.cost_tables import CostTable
from autopar.solver.model.model import Factor, FactorByMode, Model
from autopar.solver.model.objective import MEMORY, MOMENTS, Hinges, Sum

__all__ = ["TooLarge", "check_size", "count_entries", "formulate"]

# Table entries of the largest program that is built: it takes a solver some GiB of memory, and minutes.
MOST_ENTRIES = 3_000_000
# The largest cost of a state or a pair is scaled to at most so much: tolerances of solvers are absolute.
LARGEST_COST = 1e3
# Tolerances of solvers are about 1e-7: a limit is raised by this share of it, as no sum is exact.
SLACK = 1e-9


class TooLarge(AutoparError):
    """Raised for a model whose integer program no solver would end."""


def count_entries(model: Model) -> int:
    """Return how many table entries the program of a model has, at least."""
    sizes = ((table.rows.max() + 1, table.columns.max() + 1) for one in model.factors for table in _tables_of(one))
    return int(sum(rows * columns for rows, columns in sizes))


def check_size(model: Model) -> None:
    """Raise `TooLarge` for a model whose program no solver would end."""
    entries = count_entries(model)
    if entries > MOST_ENTRIES:
        states = sum(len(variable.states) for variable in model.variables)
        raise TooLarge(
            f"the integer program is too large: {len(model.variables):,} decisions, {states:,} states and "
            f"{entries:,} pairs of shardings; at most {MOST_ENTRIES:,} pairs are solved\n"
            "fix: leave the plan to the search, --solver search; or plan fewer layers, fewer axes, or a layout that "
            "fixes some dims"
        )


def formulate(model: Model, limit_gib: float = np.inf, shares: bool = True, of_memory: bool = False) -> FormulatedModel:
    """Return the integer program of a model under a memory limit.

    With `shares`, a reshard for several ops counts once, as in `evaluate`. Without, the optimum is that of the model.
    `of_memory`: the objective is the peak memory and not the time.
    """
    check_size(model)
    made = Formulation(model)
    makers = {name: node.name for node in model.setting.graph.nodes for name in node.outputs if name is not None}
    made.layer_mode += [_layer_mode(model, node, makers) for node in range(len(model.variables))]
    _add_states(made)
    for factor in model.factors:
        _add_factor(made, factor)
    if shares:
        add_shared_reshards(made)
    return _add_objective(made, limit_gib, of_memory)


# -- states ------------------------------------------------------------------------------------------------------------


def _layer_mode(model: Model, node: int, makers: dict[str, str]) -> int | None:
    """Return the recompute mode of the layer that an op, or the maker of a value, is in."""
    variable = model.variables[node]
    op = {"op": variable.name, "value": makers.get(variable.name, "")}.get(variable.kind, "")
    return model.place.get(("recompute", model.setting.graph.layer_of.get(op, "")))


def _add_states(made: Formulation) -> None:
    """Add x: a column for each mode of the layer and each state, and the rows by which one of them is taken."""
    model, builder = made.model, made.builder
    for node, variable in enumerate(model.variables):
        own = np.array([variable.at(state) for state in range(len(variable.states))]).T
        layer, group = made.layer_mode[node], builder.new_group()
        modes = [""] if layer is None else [made.mode_name(layer, i) for i in range(len(model.variables[layer].states))]
        names = [made.name(node) + mode for mode in modes]
        allowed = own[Sum.FORBIDDEN] == 0
        blocks = [made.add_priced(name, own.copy(), allowed, group, is_integer=True) for name in names]
        made.states.append(np.array([block.ids for block in blocks]))
    for node, ids in enumerate(made.states):
        layer = made.layer_mode[node]
        for mode, columns in enumerate(ids):
            suffix, count = ("", 1.0) if layer is None else (made.mode_name(layer, mode), 0.0)
            row = builder.add_rows(f"one.{made.name(node)}{suffix}", 1, count, count).ids
            builder.add(row, columns, 1.0)
            if layer is not None:
                builder.add(row, made.states[layer][:, mode], -1.0)


# -- factors -----------------------------------------------------------------------------------------------------------


def _tables_of(factor: Factor) -> Sequence[CostTable]:
    return factor.table.each if isinstance(factor.table, FactorByMode) else (factor.table,)


def _add_factor(made: Formulation, factor: Factor) -> None:
    """Add y for a factor, with a table for each mode where its costs or both of its variables depend on one."""
    *outer, first, second = factor.scope
    layers, tables = (made.layer_mode[first], made.layer_mode[second]), _tables_of(factor)
    if not outer and layers[1] == first:
        _add_by_own_mode(made, factor, tables[0])
        return
    mode = outer[0] if outer else None
    if mode is None and layers[0] is not None and layers[0] == layers[1]:
        mode, tables = layers[0], [tables[0]] * len(made.model.variables[layers[0]].states)
    maps = [
        _classes([table.rows if side == 0 else table.columns for table in tables], layers[side] == mode)
        for side in (0, 1)
    ]
    group, blocks = made.builder.new_group(), []
    for number, table in enumerate(tables):
        name = f"pair.{made.name(first)}&{made.name(second)}" + ("" if mode is None else made.mode_name(mode, number))
        rows, columns = (np.unique(each[number], return_index=True)[1] for each in maps)
        block = _add_table(made, table, name, group, rows, columns)
        blocks.append(Entries(factor, number, block, rows, columns))
    made.tables += blocks
    if mode is not None and mode not in layers:
        for number, entries in enumerate(blocks):
            row = made.builder.add_rows(f"mode.{entries.block.name}", 1, 0.0, 0.0).ids
            made.builder.add(row, entries.block.ids, 1.0)
            made.builder.add(row, made.states[mode][:, number], -1.0)
    for side, node in enumerate((first, second)):
        _add_side(made, node, maps[side], blocks, side, is_by_mode=mode is not None and layers[side] == mode)


def _classes(each: Sequence[Ints], is_apart: bool) -> list[Ints]:
    """Return the class of each state in each mode, from 0 on: one for all modes where x is not apart for each mode."""
    if is_apart:
        return [np.unique(one, return_inverse=True)[1].ravel() for one in each]
    _, together = np.unique(np.stack(each), axis=1, return_inverse=True)
    return [together.ravel()] * len(each)


def _add_by_own_mode(made: Formulation, factor: Factor, table: CostTable) -> None:
    """Add what a variable costs in each mode of its layer to the costs of x."""
    for mode, ids in enumerate(made.states[factor.scope[1]]):
        for key, values in table.parts.items():
            made.sums[int(ids[0])][key] += values[table.rows[mode], table.columns]


def _add_table(made: Formulation, table: CostTable, name: str, group: int, rows: Ints, columns: Ints) -> IndexBlock:
    """Add y: a column for each pair of a table, for a state of each of its rows and columns."""
    sums = np.zeros((len(Sum), len(rows) * len(columns)))
    for key, values in table.parts.items():
        sums[key] = values[np.ix_(table.rows[rows], table.columns[columns])].ravel()
    return made.add_priced(name, sums, sums[Sum.FORBIDDEN] == 0, group, width=len(columns))


def _add_side(
    made: Formulation, node: int, maps: Sequence[Ints], blocks: Sequence[Entries], side: int, is_by_mode: bool
) -> None:
    """Add the rows by which y agrees with x on one of its variables: apart for each mode, or over all of them."""
    builder, states = made.builder, made.states[node]
    together = [[number] for number in range(len(blocks))] if is_by_mode else [list(range(len(blocks)))]
    for numbers in together:
        first = numbers[0]
        name = f"{('rows', 'columns')[side]}.{blocks[first].block.name}"
        rows = builder.add_rows(name, int(maps[first].max()) + 1, 0.0, 0.0).ids
        columns = states[first : first + 1] if is_by_mode else states
        builder.add(rows[maps[first]][None, :], columns, -1.0)
        for number in numbers:
            ids = blocks[number].ids if side == 0 else blocks[number].ids.T
            builder.add(rows[:, None], ids, 1.0)


# -- objective ---------------------------------------------------------------------------------------------------------


def _add_objective(made: Formulation, limit_gib: float, of_memory: bool) -> FormulatedModel:
    """Add the sums, the hinges and the limits on memory, and build the program."""
    builder, hinges = made.builder, Hinges.of(made.model.setting)
    starts = sorted(made.sums)
    sums = np.concatenate([made.sums[start] for start in starts], axis=1)
    columns = np.concatenate([np.arange(start, start + made.sums[start].shape[1]) for start in starts])
    sums[Sum.FORBIDDEN] = 0.0
    memory = list(MEMORY)
    is_seconds = np.ones(len(Sum), dtype=bool)
    is_seconds[memory] = False
    unit_seconds, unit_gib = _unit(sums[is_seconds]), _unit(sums[memory])
    units = np.where(is_seconds, unit_seconds, unit_gib)
    kept = [key for key in Sum if sums[key].any()]
    totals = np.full(len(Sum), -1)
    for key in kept:
        totals[key] = builder.add_total(key.name.lower(), columns, sums[key] / units[key])
    beside = builder.add_columns("beside", len(hinges.offsets))
    for number, (slopes, offset) in enumerate(zip(hinges.slopes, hinges.offsets, strict=True)):
        row = builder.add_rows(f"hinge.{number}", 1, -np.inf, -offset / unit_seconds).ids
        builder.add(row, totals[kept], slopes[kept])
        builder.add(row, beside.ids[number : number + 1], -1.0)
    for number, moment in enumerate(MOMENTS if np.isfinite(limit_gib) else ()):
        row = builder.add_rows(f"memory.{number}", 1, -np.inf, limit_gib * (1 + SLACK) / unit_gib).ids
        builder.add(row, totals[kept], moment[kept])
    peak = builder.add_columns("peak")
    for number, moment in enumerate(MOMENTS):
        row = builder.add_rows(f"peak.{number}", 1, -np.inf, 0.0).ids
        builder.add(row, totals[kept], moment[kept])
        builder.add(row, peak.ids, -1.0)
    costs = np.zeros(builder.width)
    costs[peak.ids] = float(of_memory)
    if not of_memory:
        costs[totals[kept]] = hinges.base[kept]
        costs[beside.ids] = 1.0
    program = builder.built(costs, 0.0 if of_memory else hinges.constant / unit_seconds)
    return FormulatedModel(made.model, program, tuple(made.states), totals, unit_seconds, unit_gib)


def _unit(sums: Floats) -> float:
    """Return a power of ten by which the largest cost becomes a number near `LARGEST_COST`."""
    largest = float(np.abs(sums).max(initial=0.0))
    return float(10.0 ** np.floor(np.log10(largest / LARGEST_COST))) if largest else 1.0
