"""Places of ranks on units: groups that lie in two units, and places left free."""

from __future__ import annotations

import random
from collections import Counter
from itertools import product
from math import prod

import pytest

import autopar
from autopar.cost.hardware.cluster import load_cluster
from autopar.cost.network import Network
from autopar.cost.placement import ranks_per_unit, spread_of, straddling
from autopar.mesh import Mesh
from autopar.plans.views.notes import notes
from examples.mlp import mlp


def counted(
    sizes: tuple[tuple[str, int], ...], axes: tuple[str, ...], capacities: tuple[int | None, ...]
) -> tuple[tuple[int, int, int], ...]:
    """Units and fewest ranks of the most spread group, by counting them rank by rank."""
    names = [name for name, _ in sizes]
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(product(*(range(size) for _, size in sizes))):
        groups.setdefault(tuple(at for at, name in zip(place, names, strict=True) if name not in axes), []).append(rank)
    every = []
    for ranks in groups.values():
        counts, below = [], 1
        for unit in ranks_per_unit(sizes, capacities):
            active = Counter(rank // below for rank in range(prod(size for _, size in sizes)))
            fewest = min((own, -active[at]) for at, own in Counter(rank // below for rank in ranks).items())
            parts = {rank // below: rank // unit for rank in ranks}
            counts.append((max(Counter(parts.values()).values()), -fewest[0], -fewest[1]))
            below = unit
        every.append(tuple(reversed(counts)))
    return tuple((units, -fewest, active) for units, fewest, active in reversed(max(every)))


def test_the_most_spread_group_is_that_of_a_count_of_all_ranks() -> None:
    draw = random.Random(0)
    wide = 0
    for _ in range(300):
        sizes = tuple((f"a{i}", draw.choice((1, 2, 3, 4, 5, 8))) for i in range(draw.randint(1, 4)))
        axes = tuple(name for name, _ in sizes if draw.random() < 0.5) or (sizes[-1][0],)
        capacities = (draw.choice((2, 4, 6, 8, 9)), draw.choice((2, 3, None)), None)
        assert spread_of(sizes, axes, capacities) == counted(sizes, axes, capacities), (sizes, axes, capacities)
        wide += bool(straddling(sizes, capacities))
    assert wide > 30


@pytest.mark.parametrize(
    ("mesh", "capacities", "expected"),
    [
        ("dp=8,tp=16", (72, None), (64, 128)),  # two racks, as full ones would be
        ("dp=64,tp=16", (72, None), (64, 1024)),  # 16 racks in place of 15
        ("dp=9,tp=16", (72, None), (72, 144)),  # a third rack would be half as much again
        ("dp=2,tp=6", (8, None), (6, 12)),
        ("dp=16,tp=6", (8, None), (8, 96)),
        ("dp=3,tp=4", (8, None), (8, 12)),
        ("pp=2,dp=4,tp=8", (8, 4, None), (8, 32, 64)),
        ("dp=64,tp=16", (72, 15), (72, 1080)),  # there is no 16th rack
    ],
)
def test_units_leave_places_free_where_it_costs_few_more(
    mesh: str, capacities: tuple[int | None, ...], expected: tuple[int, ...]
) -> None:
    sizes = tuple(Mesh(mesh).whole.items())
    assert ranks_per_unit(sizes, capacities) == expected
    assert prod(size for _, size in sizes) <= prod(expected[:1]) * -(-expected[-1] // expected[0])


def test_a_group_in_two_racks_has_the_price_of_the_network() -> None:
    cluster = load_cluster("gb200")

    def seconds(mesh: str) -> float:
        return Network(cluster, Mesh(mesh).whole).seconds("all_reduce", ("tp",), 2.0**28)

    # The first group lies within a rack in all of them, but 8 of the 16 ranks of the fifth in the second rack.
    inside = seconds("dp=8,tp=16")
    assert inside == seconds("dp=4,tp=16")
    assert seconds("dp=9,tp=16") > 1.2 * inside
    # The first group of 32 ranks that lies in two racks has 8 network cards in one of them.
    assert Network(cluster, Mesh("dp=9,tp=32").whole).group(("tp",))[1].members == 8


def test_a_plan_says_which_places_are_free_and_which_groups_lie_in_two_units() -> None:
    model, inputs = mlp(batch=1440)

    def said(mesh: str) -> str:
        layout = "batch -> dp; * -> none"
        return "\n".join(notes(autopar.plan(model, mesh, inputs, cluster="gb200", layout=layout, cache=False)))

    assert "64 of 72 devices of each unit of 'nvlink' are in use" in said("dp=8,tp=16")
    assert "some groups of 16 along tp lie in two units of 'nvlink'" in said("dp=9,tp=16")
    assert "nvlink" not in said("dp=9,tp=8")
