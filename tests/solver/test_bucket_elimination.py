"""Elimination with equal parts elimination_order, beside all assignments; a node may have any number of neighbours."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest

from autopar.solver import Floats
from autopar.solver.search.bucket_elimination import TooWide, elimination_order


def total(
    costs: Sequence[Floats], scopes: Sequence[tuple[int, ...]], tables: Sequence[Floats], at: Sequence[int]
) -> float:
    own = sum(float(cost[state]) for cost, state in zip(costs, at, strict=True))
    return own + sum(
        float(table[tuple(at[node] for node in scope)]) for scope, table in zip(scopes, tables, strict=True)
    )


@pytest.mark.parametrize("seed", range(100))
def test_finds_what_all_assignments_show(seed: int) -> None:
    """Nodes of one strategy among them, and tables that are one object."""
    draw = random.Random(seed)
    numbers = np.random.default_rng(seed)
    sizes = [draw.choice((1, 1, 2, 3)) for _ in range(draw.randint(1, 7))]
    costs = [numbers.random(size) for size in sizes]
    scopes: list[tuple[int, ...]] = []
    tables: list[Floats] = []
    made: dict[tuple[int, ...], Floats] = {}
    for _ in range(draw.randint(0, 9)):
        scope = tuple(draw.sample(range(len(sizes)), min(len(sizes), draw.randint(1, 3))))
        shape = tuple(sizes[node] for node in scope)
        scopes.append(scope)
        tables.append(made.setdefault(shape, numbers.random(shape)) if draw.random() < 0.5 else numbers.random(shape))
    value, chosen = elimination_order(sizes, scopes).solve(costs, tables)
    every = product(*map(range, sizes))
    assert value == pytest.approx(min(total(costs, scopes, tables, at) for at in every), rel=1e-12)
    assert value == pytest.approx(total(costs, scopes, tables, chosen), rel=1e-12)


@pytest.mark.parametrize("users", [63, 64, 65, 300])
@pytest.mark.parametrize("options", [1, 2])
@pytest.mark.parametrize("hubs", [1, 2])
def test_a_node_has_any_number_of_users(users: int, options: int, hubs: int) -> None:
    """As the sines and cosines of a rotary embedding have, two in each layer; arrays have 64 axes at most."""
    numbers = np.random.default_rng(users)
    sizes = [3] * hubs + [options] * users
    costs = [numbers.random(size) for size in sizes]
    scopes = [(hub, hubs + user) for hub in range(hubs) for user in range(users)]
    tables = [numbers.random((3, options)) for _ in scopes]
    value, chosen = elimination_order(sizes, scopes).solve(costs, tables)
    assert value == pytest.approx(total(costs, scopes, tables, chosen), rel=1e-12)

    def beside(at: tuple[int, ...]) -> float:
        """Users know nothing of each other, so each does what is best beside the hubs."""
        found = sum(float(costs[hub][state]) for hub, state in enumerate(at))
        for user in range(users):
            each = costs[hubs + user].copy()
            for hub, state in enumerate(at):
                each += tables[hub * users + user][state]
            found += float(each.min())
        return found

    assert value == pytest.approx(min(map(beside, product(range(3), repeat=hubs))), rel=1e-12)


def test_a_table_over_many_nodes_of_one_strategy() -> None:
    numbers = np.random.default_rng(0)
    sizes = [1] * 40 + [2, 2]
    scope = tuple(range(42))
    costs, table = [numbers.random(size) for size in sizes], numbers.random(sizes)
    value, chosen = elimination_order(sizes, [scope]).solve(costs, [table])
    assert value == pytest.approx(total(costs, [scope], [table], chosen), rel=1e-12)


def test_too_many_neighbours_with_a_choice_are_too_wide() -> None:
    """All know all others: no order makes the tables small."""
    scopes = [(i, j) for i in range(70) for j in range(i)]
    with pytest.raises(TooWide):
        elimination_order([2] * 70, scopes)


def test_parts_that_share_no_variable_are_cut_at_once() -> None:
    """Of each wheel its hub goes, which is in all of its large tables; of a wheel of two hubs one variable alone."""

    def wheel(hub: int, around: Sequence[int]) -> list[tuple[int, ...]]:
        return [*((hub, each) for each in around), *zip(around, (*around[1:], around[0]), strict=True)]

    degree = dict.fromkeys(range(10), 1)
    apart = elimination_order([3] * 10, [*wheel(0, range(1, 5)), *wheel(5, range(6, 10))])
    assert apart.nodes_of_large(3**3, degree) == [0, 5]
    together = elimination_order([3] * 6, [*wheel(0, range(2, 6)), *wheel(1, range(2, 6))])
    assert len(together.nodes_of_large(3**3, degree)) == 1
    assert apart.nodes_of_large(apart.largest, degree) == []
    del degree[0]
    others = apart.nodes_of_large(3**3, degree)
    assert 0 not in others, "what has no degree stays"
    assert len(others) == 2
