"""What algorithms send: every algorithm for every collective on many groups; exact numbers, by running schedules."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import ceil, log2, prod

import pytest

from autopar.cost.algorithm_registry import ALGORITHMS
from autopar.cost.collective_algorithms import KINDS, LevelSpan, Phase, TopologyLevel

LEVELS = [TopologyLevel(f"level{i}", "wire", 1, 1.0) for i in range(3)]
# Units by level, the innermost first.
SHAPES = [
    (2,),
    (3,),
    (4,),
    (5,),
    (6,),
    (7,),
    (8,),
    (16,),
    (2, 2),
    (4, 2),
    (8, 2),
    (2, 3),
    (8, 16),
    (3, 5),
    (2, 4, 2),
    (8, 3, 4),
]

Group = tuple[LevelSpan, ...]


def group_of(units: tuple[int, ...]) -> Group:
    return tuple(LevelSpan(LEVELS[i], count, prod(units[:i]), 1.0, 1.0, i == 0) for i, count in enumerate(units))


CASES = [
    (name, kind, units)
    for name, kind, units in product(ALGORITHMS, KINDS, SHAPES)
    if ALGORITHMS[name](kind, group_of(units)) is not None
]


def totals(name: str, kind: str, units: tuple[int, ...]) -> tuple[list[float], list[float]]:
    """Hops and traffic by level, over all phases."""
    way = ALGORITHMS[name](kind, group_of(units))
    assert way is not None
    levels = range(len(units))
    return [sum(phase.hops[i] for phase in way) for i in levels], [
        sum(phase.traffic[i] for phase in way) for i in levels
    ]


def least(kind: str, p: int) -> float:
    """What every rank must send or receive of a buffer of 1 byte, whatever the algorithm; a switch may add and copy."""
    return {"all_reduce": 1.0, "broadcast": 1.0, "reduce": 1.0, "send": 1.0, "halo_exchange": 1.0}.get(
        kind, (p - 1) / p
    )


@pytest.mark.parametrize(("name", "kind", "units"), CASES, ids=str)
def test_every_algorithm_on_every_group(name: str, kind: str, units: tuple[int, ...]) -> None:
    hops, traffic = totals(name, kind, units)
    assert sum(hops) > 0
    assert min(*hops, *traffic) >= 0
    # The outermost level is passed by no less than what must come into a unit, and no level by more than a naive way
    # sends.
    p, members = prod(units), prod(units[:-1])
    inside = (p - members) / p if kind not in ("broadcast", "reduce", "send", "halo_exchange") else 1.0
    assert traffic[-1] >= min(inside, least(kind, p)) * (1 if len(units) == 1 else 0.5) - 1e-12
    assert max(traffic) <= 2 * p * ceil(log2(p))


def test_each_collective_has_an_algorithm_and_each_algorithm_a_collective() -> None:
    assert {kind for _, kind, _ in CASES} == set(KINDS)
    # PAT is for one rank of each node, which no group here is.
    assert {name for name, _, _ in CASES} == set(ALGORITHMS) - {"pat"}


@pytest.mark.parametrize("p", [2, 3, 4, 5, 7, 8, 16, 64])
def test_formulas(p: int) -> None:
    log = ceil(log2(p))
    assert totals("ring", "all_reduce", (p,)) == ([2 * (p - 1)], [2 * (p - 1) / p])
    assert totals("ring", "all_gather", (p,)) == ([p - 1], [(p - 1) / p])
    assert totals("ring", "reduce_scatter", (p,)) == ([p - 1], [(p - 1) / p])
    assert totals("ring", "broadcast", (p,)) == ([p - 1], [1.0])
    assert totals("double_binary_tree", "all_reduce", (p,)) == ([2 * log], [min(2.0, p / 2)])
    assert totals("double_binary_tree", "broadcast", (p,)) == ([log], [1.0])
    assert totals("tree_of_chains", "all_reduce", (p,)) == ([2 * (p - 1)], [min(2.0, p - 1.0)])
    assert totals("nvls", "all_reduce", (p,)) == ([1.0], [1 + 1 / p])
    assert totals("direct", "all_to_all", (p,)) == ([1.0], [(p - 1) / p])
    assert totals("direct", "gather", (p,)) == ([1.0], [(p - 1) / p])
    assert totals("direct", "send", (p,)) == ([1.0], [1.0])
    if p & (p - 1) == 0:
        for name in ("halving_doubling", "binary_blocks"):
            assert totals(name, "all_reduce", (p,)) == ([2 * log], [2 * (p - 1) / p])
        assert totals("halving_doubling", "all_gather", (p,)) == ([log], [(p - 1) / p])


def test_formulas_of_hierarchies() -> None:
    assert totals("torus", "all_reduce", (8, 4)) == ([14, 6], [2 * 7 / 8, 2 * 3 / 4])
    assert totals("hierarchical_ring", "all_reduce", (8, 4)) == ([14, 6], [2.0, 2 * 3 / 4])
    assert totals("nvls_tree", "all_reduce", (8, 4)) == ([1.0, 4.0], [1 + 1 / 8, 2.0])
    assert totals("sharp", "all_reduce", (8, 4)) == ([1.0, 2.0], [1 + 1 / 8, 1.0])
    assert totals("tree_of_chains", "all_reduce", (8, 4)) == ([14, 4], [2.0, 2.0])
    # Chains are within nodes; 16 nodes of a pod, and 4 pods, have trees.
    assert totals("tree_of_chains", "all_reduce", (8, 16, 4)) == ([14, 8, 4], [2.0, 2.0, 2.0])
    assert totals("exchange_of_chains", "all_reduce", (8, 2)) == ([14, 2], [2.0, 1.0])
    assert totals("nvls_exchange", "all_reduce", (8, 2)) == ([1.0, 2.0], [1 + 1 / 8, 1.0])
    # One rank of each node: nothing is a chain.
    alone = (LevelSpan(LEVELS[1], 4, 1, 1.0, 1.0, False),)
    assert ALGORITHMS["tree_of_chains"]("all_reduce", alone) == (Phase((4.0,), (2.0,), pipelined=True),)
    assert totals("halving_doubling", "all_reduce", (7,)) == ([2 * 2 + 2], [2 * 3 / 4 + 2])


# -- schedules, run ---------------------------------------------------------------------------------------------------

Message = tuple[int, int, float]
"""From, to, bytes of a buffer of 1."""


def ring_all_reduce(p: int) -> Iterator[Message]:
    for _ in range(2 * (p - 1)):
        yield from ((rank, (rank + 1) % p, 1 / p) for rank in range(p))


def torus_all_reduce(units: tuple[int, ...]) -> Iterator[Message]:
    """Rings of each level, in which a rank has a slice of what its group has; there and back."""
    p, size = prod(units), 1.0
    stride = 1
    for count in units:
        for _ in range(2 * (count - 1)):
            for rank in range(p):
                place = rank // stride % count
                yield rank, rank + ((place + 1) % count - place) * stride, size / count
        size, stride = size / count, stride * count


def halving_doubling_all_reduce(units: tuple[int, ...]) -> Iterator[Message]:
    p, size, distance = prod(units), 0.5, 1
    while distance < p:
        for rank in range(p):
            yield rank, rank ^ distance, 2 * size  # once to halve, once to double
        size, distance = size / 2, 2 * distance


def all_to_all(p: int) -> Iterator[Message]:
    yield from ((one, other, 1 / p) for one in range(p) for other in range(p) if one != other)


def double_tree_all_reduce(n: int) -> Iterator[Message]:
    """Two binary trees, each with half of the data, up and down: what is inside the one is a leaf of the other.

    Numbers in order: the parent of an odd number is even, and so on; where there is no such parent, the next below.
    """
    for tree in (0, 1):
        for node in range(1, n):
            lowest = node & -node
            parent = (node - lowest) | (2 * lowest)
            parent = parent if parent < n else node - lowest
            places = (node, parent)
            if tree:  # turned round, so that odd and even change places; shifted where that would not do
                places = tuple(n - 1 - place if n % 2 == 0 else (place - 1) % n for place in places)
            yield places[0], places[1], 0.5
            yield places[1], places[0], 0.5


def passed(messages: Iterator[Message], units: tuple[int, ...], through: bool = False) -> list[float]:
    """What the busiest unit of each level sends to others; a message counts at the highest level it crosses.

    `through`: at all levels that it crosses.
    """
    sizes = [prod(units[:i]) for i in range(len(units) + 1)]
    sent: list[dict[int, float]] = [{} for _ in units]
    for one, other, amount in messages:
        crossed = [i for i in range(len(units)) if one // sizes[i] != other // sizes[i]]
        for i in crossed if through else crossed[-1:]:
            unit = one // sizes[i]
            sent[i][unit] = sent[i].get(unit, 0.0) + amount
    return [max(units_sent.values(), default=0.0) for units_sent in sent]


@pytest.mark.parametrize("units", SHAPES, ids=str)
def test_a_ring_sends_this(units: tuple[int, ...]) -> None:
    assert passed(ring_all_reduce(prod(units)), units) == pytest.approx(totals("ring", "all_reduce", units)[1])


@pytest.mark.parametrize("units", [shape for shape in SHAPES if len(shape) > 1], ids=str)
def test_a_torus_sends_this(units: tuple[int, ...]) -> None:
    assert passed(torus_all_reduce(units), units) == pytest.approx(totals("torus", "all_reduce", units)[1])


@pytest.mark.parametrize("units", [(2,), (4,), (8,), (16,), (2, 2), (4, 2), (8, 2), (8, 16), (2, 4, 2)], ids=str)
def test_halving_and_doubling_send_this(units: tuple[int, ...]) -> None:
    expected = totals("halving_doubling", "all_reduce", units)[1]
    assert passed(halving_doubling_all_reduce(units), units) == pytest.approx(expected)


@pytest.mark.parametrize("units", SHAPES, ids=str)
def test_all_to_all_sends_this(units: tuple[int, ...]) -> None:
    sent = passed(all_to_all(prod(units)), units, through=True)
    assert sent == pytest.approx(totals("direct", "all_to_all", units)[1])


@pytest.mark.parametrize("n", range(2, 34))
def test_two_trees_send_no_more_than_this(n: int) -> None:
    messages = list(double_tree_all_reduce(n))
    assert len(messages) == 4 * (n - 1)  # each tree spans all
    (busiest,) = passed(iter(messages), (n,))
    (priced,) = totals("double_binary_tree", "all_reduce", (n,))[1]
    assert busiest <= priced + 1e-12
    if n in (2, 4, 8, 16, 32):
        assert busiest == priced
