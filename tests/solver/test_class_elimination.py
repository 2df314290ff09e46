"""Elimination by classes finds the least of all assignments, of random models."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import numpy as np
import pytest

import autopar.solver.search.class_elimination as module
from autopar.solver.search.bucket_elimination import TooWide
from autopar.solver.search.class_elimination import ClassTable, Single, class_elimination


def random_model(rng: random.Random, most: int = 6) -> tuple[list[Single], list[ClassTable], list[Single]]:
    """Return costs of variables, and tables of pairs; some pairs are forbidden, and equal maps are one object."""
    sizes = [rng.randint(1, 5) for _ in range(rng.randint(1, most))]
    costs = [np.array([rng.random() for _ in range(size)], dtype=np.float32) for size in sizes]
    maps: list[dict[int, np.ndarray]] = [{} for _ in sizes]

    def side(node: int) -> np.ndarray:
        count = rng.randint(1, sizes[node])
        if count not in maps[node]:
            classes = np.array([*range(count), *(rng.randrange(count) for _ in range(sizes[node] - count))])
            maps[node][count] = classes if count == sizes[node] else rng_shuffled(rng, classes)
        return maps[node][count]

    tables, values = [], []
    for _ in range(rng.randint(0, most + 2) if len(sizes) > 1 else 0):
        nodes = tuple(rng.sample(range(len(sizes)), rng.choice([1, 2, 2])))
        classes = tuple(side(node) for node in nodes)
        shape = [int(one.max()) + 1 for one in classes]
        made = np.array([rng.random() if rng.random() < 0.9 else np.inf for _ in range(int(np.prod(shape)))])
        tables.append(ClassTable(nodes, classes))
        values.append(made.reshape(shape).astype(np.float32))
    return costs, tables, values


def rng_shuffled(rng: random.Random, classes: np.ndarray) -> np.ndarray:
    found = classes.tolist()
    rng.shuffle(found)
    return np.array(found)


def total(costs: list[Single], tables: list[ClassTable], values: list[Single], chosen: tuple[int, ...]) -> float:
    found = sum(float(cost[state]) for cost, state in zip(costs, chosen, strict=True))
    for table, value in zip(tables, values, strict=True):
        at = tuple(int(classes[chosen[node]]) for node, classes in zip(table.nodes, table.classes, strict=True))
        found += float(value[at])
    return found


def check(seed: int) -> int:
    costs, tables, values = random_model(random.Random(seed))
    made = class_elimination([len(cost) for cost in costs], tables)
    bound, chosen = made.solve(costs, values)
    least = min(total(costs, tables, values, each) for each in product(*(range(len(cost)) for cost in costs)))
    if not np.isfinite(least):
        assert not np.isfinite(bound)
        return len(made.owners)
    assert total(costs, tables, values, tuple(chosen)) == pytest.approx(least, abs=1e-5)
    assert bound <= least + 1e-12
    assert bound == pytest.approx(least, abs=1e-3)
    return len(made.owners)


def test_random_models() -> None:
    assert sum(check(seed) for seed in range(150)) > 100  # with ports


@pytest.mark.parametrize("tile", [1, 4, 7, 2**17])
def test_large_tables_are_made_in_tiles(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As all tables of two numbers are here."""
    monkeypatch.setattr(module, "FEW", 2)
    monkeypatch.setattr(module, "TILE", tile)
    made, tiles = list[int](), module._tiles
    monkeypatch.setattr(module, "_tiles", lambda shape: (each for each in (made.append(1), *tiles(shape)) if each))
    assert sum(check(seed) for seed in range(150)) > 100
    assert len(made) > 50


@pytest.mark.slow
def test_more_random_models() -> None:
    for seed in range(150, 3000):
        check(seed)


def test_equal_parts_are_computed_once() -> None:
    """Users of one value with equal costs have one step, however many they are."""
    cost, classes = np.arange(4, dtype=np.float32), np.array([0, 0, 1, 1])
    link = np.array([[0.0, 1.0], [1.0, 0.5]], dtype=np.float32)
    for users in (16, 64):
        tables = [ClassTable((0, i), (classes, classes)) for i in range(1, users)]
        made = class_elimination([4] * users, tables)
        firsts = made._firsts([cost] * users, [link] * len(tables))
        assert len(set(firsts)) < 5 < len(firsts)
        assert made.solve([cost] * users, [link] * len(tables))[0] == 0.0


def test_too_wide_a_step_is_refused() -> None:
    tables = [ClassTable((i, j), (np.arange(8), np.arange(8))) for i in range(5) for j in range(i)]
    with pytest.raises(TooWide):
        class_elimination([8] * 5, tables, largest=8**3)


def test_only_what_changed_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls with some other tables give what a new elimination gives."""
    computed = list[int]()
    result = module.ClassElimination._result

    def counted(made: module.ClassElimination, step: Any, *given: Any) -> Any:
        computed.append(step.node)
        return result(made, step, *given)

    monkeypatch.setattr(module.ClassElimination, "_result", counted)
    fewer = 0
    for seed in range(60):
        rng = random.Random(seed)
        costs, tables, values = random_model(rng)
        sizes = [len(cost) for cost in costs]
        made = class_elimination(sizes, tables)
        made.solve(costs, values)
        for _ in range(4):
            for place in rng.sample(range(len(values)), min(1, len(values))):
                values[place] = (values[place] + rng.random()).astype(np.float32)
            computed.clear()
            found = made.solve(costs, values)
            again = len(computed)
            computed.clear()
            assert found == class_elimination(sizes, tables).solve(costs, values)
            fewer += len(computed) - again
        assert made.solve(costs, values) == found
    assert fewer > 200


def test_all_nodes_whose_steps_change_are_weighed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    eliminate = module._ClassOrder._eliminate
    changes = list[int]()

    def checked(order: module._ClassOrder, node: int, kept: int | None) -> set[int]:
        heads = {order._head(one) for one in range(len(order.sizes)) if order.is_left[one]}
        before = {one: order._cheapest(one) for one in heads if order.is_left[one]}
        found = eliminate(order, node, kept)
        changed = {one for one, step in before.items() if order.is_left[one] and order._cheapest(one) != step}
        assert changed <= found
        changes.append(len(changed))
        return found

    monkeypatch.setattr(module._ClassOrder, "_eliminate", checked)
    for seed in range(100):
        costs, tables, _ = random_model(random.Random(seed), most=20)
        class_elimination([len(cost) for cost in costs], tables)
    assert sum(changes) > 300


def test_users_of_one_value_are_weighed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The elimination of one user changes no step of another."""
    weighed, cheapest = list[int](), module._ClassOrder._cheapest
    monkeypatch.setattr(
        module._ClassOrder, "_cheapest", lambda order, node: weighed.append(node) or cheapest(order, node)
    )
    users = range(1, 200)
    tables = [ClassTable((0, i), (np.arange(3), np.arange(4))) for i in users]
    class_elimination([3, *(4 for _ in users)], tables)
    assert len(weighed) < 4 * len(users)
