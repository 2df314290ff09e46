"""Reshard on simulated ranks: every conversion exact forward and backward, and no cheaper order of steps."""

from __future__ import annotations

import heapq
import random
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain, combinations, permutations
from math import prod

import pytest
import torch

from autopar.errors import LayoutError
from autopar.mesh import SubMesh
from autopar.sharding.reshard.reshard import (
    NoSteps,
    Reshard,
    ScaledReshards,
    Step,
    StepKind,
    _RemainingBound,
    cheapest,
    reshard,
    steps,
)
from autopar.sharding.sharding import GROUP, OTHER, ROW, Atoms, Sharding
from tests.simulation import Everywhere, all_layouts, drawn_sharding, gather, run, scatter

CASES = [
    (Atoms.plain((6,)), {"a": 2}),
    (Atoms.plain((5, 3)), {"a": 2}),
    (Atoms((3, 4, 2), (2, 1)), {"a": 2}),
    (Atoms((2, 7, 4), (2, 1)), {"a": 3}),
    (Atoms.plain((1, 6)), {"a": 3}),
    (Atoms.plain((12,)), {"a": 2, "b": 2}),
    (Atoms.plain((5,)), {"a": 2, "b": 2}),
    (Atoms.plain((4, 8)), {"a": 2, "b": 2}),
    (Atoms.plain((7, 5)), {"a": 2, "b": 3}),
    (Atoms((6, 6), (2,)), {"a": 2, "b": 3}),
    (Atoms((3, 4, 4), (3,)), {"a": 2, "b": 2}),
    (Atoms((2, 5, 3), (1, 2)), {"a": 3, "b": 2}),
    (Atoms.plain((8,)), {"a": 2, "b": 2, "c": 2}),
    (Atoms.plain((9, 8)), {"a": 2, "b": 2, "c": 2}),
    (Atoms((3, 8, 5), (2, 1)), {"a": 2, "b": 2, "c": 2}),
    (Atoms.plain(()), {"a": 2, "b": 2}),
    (Atoms.plain((0, 3)), {"a": 2, "b": 2}),
]


def splits(*axes: str, partial: str = "", broadcast: str = "") -> Sharding:
    """One word per atom, one letter per axis."""
    return Sharding(tuple(tuple(word) for word in axes), frozenset(partial), frozenset(broadcast))


def name_of(case: object) -> str:
    return str(case.sizes) if isinstance(case, Atoms) else "x".join(f"{a}{n}" for a, n in dict(case).items())  # type: ignore[call-overload]


def check(conversion: Reshard, flip: bool = False) -> None:
    """The forward gives the value, the backward the gradient, and each step sends what it says."""
    atoms, axes = conversion.atoms, dict(conversion.axes)
    for way in (conversion, conversion.gradient):
        value = torch.randn(atoms.shape, dtype=torch.float64)
        local, sent = run(way, way.forward, scatter(value, way.source, atoms, axes), flip)
        torch.testing.assert_close(gather(local, way.target, atoms, axes), value, rtol=1e-12, atol=1e-12)
        assert sent == [step.sent_numel for step in way.forward]


@pytest.mark.parametrize(("atoms", "axes"), CASES, ids=name_of)
def test_every_conversion_gives_the_value_and_the_gradient(atoms: Atoms, axes: Mapping[str, int]) -> None:
    layouts = list(all_layouts(atoms, axes))
    pairs = [(source, target) for source in layouts for target in layouts]
    most = 120 if len(axes) < 3 else 50
    if len(pairs) > most:
        pairs = random.Random(len(pairs)).sample(pairs, most)
    for i, (source, target) in enumerate(pairs):
        check(reshard(atoms, source, target, axes), flip=i % 2 == 1)


def gradient_of(
    atoms: Atoms, axes: Mapping[str, int], layouts: list[Sharding], conversions: list[Reshard]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pointwise ops with a conversion after each; the gradient of a loss, of the simulated ranks and of one process.

    Along P only multiplying by a constant is legal, so that is the op there; elsewhere it is a sine.
    """
    value = torch.randn(atoms.shape, dtype=torch.float64)
    factors = [torch.randn(atoms.shape, dtype=torch.float64) for _ in layouts]

    def op(x: torch.Tensor, factor: torch.Tensor, layout: Sharding) -> torch.Tensor:
        return x * factor if layout.partial else torch.sin(x * factor)

    whole = value.clone().requires_grad_()
    x = whole
    for layout, factor in zip(layouts, factors, strict=True):
        x = op(x, factor, layout)
    (expected,) = torch.autograd.grad(x.sum(), whole)

    leaves = [part.requires_grad_() for part in scatter(value, layouts[0], atoms, axes)]
    now: list[torch.Tensor] = list(leaves)
    for layout, factor, conversion in zip(layouts, factors, conversions, strict=True):
        constant = scatter(factor, layout.without(layout.partial), atoms, axes)
        now = [op(part, own, layout) for part, own in zip(now, constant, strict=True)]
        now = list(Everywhere.apply(conversion, *now))
    # Every rank runs backward from its own copy of the loss.
    torch.autograd.backward([part.sum() for part in now])
    grads = [leaf.grad for leaf in leaves]
    return gather([g for g in grads if g is not None], layouts[0].gradient, atoms, axes), expected


def a_program(rng: random.Random, atoms: Atoms, axes: Mapping[str, int]) -> tuple[list[Sharding], list[Reshard]]:
    legal = list(all_layouts(atoms, axes))
    layouts = [rng.choice(legal) for _ in range(3)]
    ends = [*layouts[1:], Sharding.replicated(atoms)]
    return layouts, [reshard(atoms, s, t, axes) for s, t in zip(layouts, ends, strict=True)]


@pytest.mark.parametrize(("atoms", "axes"), CASES[:15], ids=name_of)
def test_gradients_of_programs_are_those_of_one_process(atoms: Atoms, axes: Mapping[str, int]) -> None:
    rng = random.Random(7)
    for seed in range(12):
        torch.manual_seed(seed)
        actual, expected = gradient_of(atoms, axes, *a_program(rng, atoms, axes))
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_without_its_all_reduce_a_broadcast_gives_wrong_gradients() -> None:
    atoms, axes = Atoms.plain((6,)), {"a": 2}
    layouts = [splits("", broadcast=""), splits("", broadcast="a"), splits("a")]
    ends = [*layouts[1:], splits("")]
    conversions = [reshard(atoms, s, t, axes) for s, t in zip(layouts, ends, strict=True)]
    actual, expected = gradient_of(atoms, axes, layouts, conversions)
    torch.testing.assert_close(actual, expected)

    assert [step.kind for step in conversions[0].backward] == [StepKind.ALL_REDUCE]
    conversions[0] = replace(conversions[0], backward=())
    with pytest.raises(AssertionError):
        gradient_of(atoms, axes, layouts, conversions)


def test_without_keeping_one_an_output_gives_gradients_too_large() -> None:
    atoms, axes = Atoms.plain((6,)), {"a": 3}
    layouts, ends = [splits("a"), splits("", broadcast="a")], [splits("", broadcast="a"), splits("")]
    conversions = [reshard(atoms, s, t, axes) for s, t in zip(layouts, ends, strict=True)]
    conversions[1] = replace(conversions[1], backward=())
    actual, expected = gradient_of(atoms, axes, layouts, conversions)
    torch.testing.assert_close(actual, 3 * expected)


# -- the steps that are chosen ----------------------------------------------------------------------------------------

R2 = splits("", "")
GOLDEN = [
    # One axis: the table of the four states.
    (R2, splits("", "", broadcast="a"), "", "all_reduce(a)"),
    (splits("", "", partial="a"), R2, "all_reduce(a)", ""),
    (splits("", "", partial="a"), splits("a", ""), "reduce_scatter(a) 0", "all_gather(a) 0"),
    (splits("a", ""), splits("", "", broadcast="a"), "all_gather(a) 0", "reduce_scatter(a) 0"),
    (splits("a", ""), R2, "all_gather(a) 0", "slice(a) 0"),
    (R2, splits("a", ""), "slice(a) 0", "all_gather(a) 0"),
    (splits("", "", broadcast="a"), splits("a", ""), "slice(a) 0", "pad(a) 0"),
    (splits("a", ""), splits("", "a"), "all_to_all(a) 0 -> 1(a)", "all_to_all(a) 1 -> 0(a)"),
    (splits("", "", partial="a"), splits("", "", broadcast="a"), "all_reduce(a)", "all_reduce(a)"),
    (splits("", "", broadcast="a"), R2, "", "keep_one(a)"),
    (splits("", "", broadcast="a"), splits("", "", partial="a"), "keep_one(a)", "keep_one(a)"),
    (R2, splits("", "", partial="a"), "keep_one(a)", ""),
    (splits("a", ""), splits("", "", partial="a"), "pad(a) 0", "slice(a) 0"),
    (splits("ab", ""), splits("ba", ""), "all_to_all(a*b) 0 -> 0(b*a)", "all_to_all(b*a) 0 -> 0(a*b)"),
    # Several axes: fused where they do the same, slices early, gathers late.
    (splits("", "", partial="ab"), R2, "all_reduce(a*b)", ""),
    (splits("", "", partial="ab"), splits("ab", ""), "reduce_scatter(a*b) 0", "all_gather(a*b) 0"),
    (splits("", "", partial="ab"), splits("ba", ""), "reduce_scatter(b*a) 0", "all_gather(b*a) 0"),
    (splits("ab", ""), R2, "all_gather(a*b) 0", "slice(a*b) 0"),
    (splits("ab", ""), splits("", "", broadcast="ab"), "all_gather(a*b) 0", "reduce_scatter(a*b) 0"),
    (splits("ab", ""), splits("", "ab"), "all_to_all(a*b) 0 -> 1(a*b)", "all_to_all(a*b) 1 -> 0(a*b)"),
    (splits("a", ""), splits("a", "b"), "slice(b) 1", "all_gather(b) 1"),
    (splits("a", "", partial="b"), splits("a", "b"), "reduce_scatter(b) 1", "all_gather(b) 1"),
    (splits("a", "", partial="b"), splits("ab", ""), "reduce_scatter(b) 0", "all_gather(b) 0"),
    (splits("a", "", partial="b"), R2, "all_reduce(b), all_gather(a) 0", "slice(a) 0"),
    (splits("", "", partial="a"), splits("b", ""), "slice(b) 0, all_reduce(a)", "all_gather(b) 0"),
    (splits("a", ""), splits("", "b"), "slice(b) 1, all_gather(a) 0", "slice(a) 0, all_gather(b) 1"),
    # What is split the same way in both layouts stays split.
    (splits("ab", ""), splits("a", "b"), "all_to_all(b) 0 -> 1(b)", "all_to_all(b) 1 -> 0(b)"),
    (splits("ab", ""), splits("a", "", broadcast="b"), "all_gather(b) 0", "reduce_scatter(b) 0"),
]


def text(way: tuple[Step, ...]) -> str:
    return ", ".join(map(str, way))


@pytest.mark.parametrize(("source", "target", "forward", "backward"), GOLDEN)
def test_textbook_steps(source: Sharding, target: Sharding, forward: str, backward: str) -> None:
    conversion = reshard(Atoms.plain((8, 12)), source, target, {"a": 2, "b": 2})
    assert (text(conversion.forward), text(conversion.backward)) == (forward, backward)


def test_the_numbers_of_a_step() -> None:
    atoms, axes = Atoms.plain((5, 6)), {"a": 2}
    numbers = {
        "all_reduce": steps(atoms, splits("", "", partial="a"), R2, axes),
        "reduce_scatter": steps(atoms, splits("", "", partial="a"), splits("", "a"), axes),
        "all_gather": steps(atoms, splits("a", ""), R2, axes),  # 5 rows are padded to 6
        "all_to_all": steps(atoms, splits("a", ""), splits("", "a"), axes),  # 3 rows, half of each goes away
        "slice": steps(atoms, R2, splits("a", ""), axes),
    }
    assert {kind: (step.kind.value, step.numel, step.sent_numel) for kind, (step,) in numbers.items()} == {
        "all_reduce": ("all_reduce", 30, 30),
        "reduce_scatter": ("reduce_scatter", 30, 15),
        "all_gather": ("all_gather", 36, 18),
        "all_to_all": ("all_to_all", 18, 9),
        "slice": ("slice", 0, 0),
    }


def test_an_axis_of_size_1_does_nothing() -> None:
    conversion = reshard(Atoms.plain((8,)), splits("a", partial="b"), splits(""), {"a": 1, "b": 2})
    assert (text(conversion.forward), text(conversion.backward)) == ("all_reduce(b)", "")
    check(conversion)


def test_the_gradient_of_the_gradient_is_the_conversion() -> None:
    conversion = reshard(Atoms.plain((8,)), splits("a", partial="b"), splits("", broadcast="a"), {"a": 2, "b": 2})
    assert conversion.gradient.gradient == conversion
    remade = reshard(conversion.atoms, conversion.gradient.source, conversion.gradient.target, dict(conversion.axes))
    assert remade == conversion.gradient


def test_layouts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"names axis 'z', but the mesh has a, b"):
        reshard(Atoms.plain((8,)), splits("z"), splits(""), {"a": 2, "b": 2})
    with pytest.raises(ValueError, match="is for 2 atoms, the tensor has 1"):
        reshard(Atoms.plain((8,)), R2, splits(""), {"a": 2})


# -- no cheaper order exists ------------------------------------------------------------------------------------------


class Exhaustive:
    """Prices every sequence of steps, sensible or not, over the axes that differ; formulas for even sizes only.

    The one rule of the game: sums are made over the axes of `wanted` only, and those are not reduced again.
    """

    def __init__(
        self,
        sizes: tuple[int, ...],
        axes: Mapping[str, int],
        frozen: Sharding,
        wanted: frozenset[str],
    ):
        self.sizes, self.axes = sizes, axes
        self.frozen, self.wanted = frozen, wanted
        self.active = [axis for axis in axes if axis not in frozen.axes]

    def ranks(self, over: tuple[str, ...]) -> int:
        count = 1
        for axis in over:
            count *= self.axes[axis]
        return count

    def numel(self, layout: Sharding) -> int:
        count = 1
        for size, split in zip(self.sizes, layout.splits, strict=True):
            count *= size // self.ranks(split)
        return count

    def edges(self, layout: Sharding) -> list[tuple[float, Sharding]]:
        found: list[tuple[float, Sharding]] = []
        cut = {axis for split in layout.splits for axis in split}
        same = [axis for axis in self.active if axis not in cut | layout.partial]
        sums = [axis for axis in self.active if axis in layout.partial - self.wanted]
        numel = self.numel(layout)

        def orders(axes: list[str]) -> list[tuple[str, ...]]:
            return list(chain.from_iterable(permutations(axes, count) for count in range(1, len(axes) + 1)))

        def add(sent: float, held: list[tuple[str, ...]], partial: frozenset[str]) -> None:
            found.append((sent, Sharding(tuple(held), partial)))

        for count in range(1, 4):
            for over in combinations(sums, count):
                p = self.ranks(over)
                add(2 * (p - 1) * numel / p, list(layout.splits), layout.partial - set(over))
            for over in combinations([axis for axis in same if axis in self.wanted], count):
                add(0, list(layout.splits), layout.partial | set(over))
        for atom, split in enumerate(layout.splits):
            for over in orders(same):
                add(0, self.held(layout, {atom: split + over}), layout.partial)
            for over in orders(sums):
                p = self.ranks(over)
                add((p - 1) * numel / p, self.held(layout, {atom: split + over}), layout.partial - set(over))
            for count in range(1, len(split) - len(self.frozen.splits[atom]) + 1):
                over, kept = split[-count:], split[:-count]
                p = self.ranks(over)
                add((p - 1) * numel, self.held(layout, {atom: kept}), layout.partial)
                if self.wanted.issuperset(over):
                    add(0, self.held(layout, {atom: kept}), layout.partial | set(over))
                for other in range(len(self.sizes)):
                    for order in permutations(over):
                        if other != atom:
                            held = self.held(layout, {atom: kept, other: layout.splits[other] + order})
                            add((p - 1) * numel / p, held, layout.partial)
                        elif order != over:
                            moved = any(i != j for i, j in self.moves(over, order))
                            held = self.held(layout, {atom: kept + order})
                            add(numel if moved else 0, held, layout.partial)
        return found

    def held(self, layout: Sharding, changed: Mapping[int, tuple[str, ...]]) -> list[tuple[str, ...]]:
        return [changed.get(atom, split) for atom, split in enumerate(layout.splits)]

    def moves(self, over: tuple[str, ...], order: tuple[str, ...]) -> list[tuple[int, int]]:
        """The piece that each rank holds before and after a change of order."""
        places = [{}]
        for axis in over:
            places = [place | {axis: i} for place in places for i in range(self.axes[axis])]

        def piece(place: Mapping[str, int], axes: tuple[str, ...]) -> int:
            index = 0
            for axis in axes:
                index = index * self.axes[axis] + place[axis]
            return index

        return [(piece(place, over), piece(place, order)) for place in places]

    def distances(self, source: Sharding) -> dict[Sharding, float]:
        queue: list[tuple[float, int, Sharding]] = [(0.0, 0, source)]
        best: dict[Sharding, float] = {}
        count = 0
        while queue:
            cost, _, layout = heapq.heappop(queue)
            if layout in best:
                continue
            best[layout] = cost
            for sent, after in self.edges(layout):
                count += 1
                heapq.heappush(queue, (cost + sent, count, after))
        return best


@pytest.mark.parametrize(
    ("sizes", "axes"),
    [
        ((12,), {"a": 2, "b": 2}),
        ((12, 12), {"a": 2, "b": 3}),
        ((8, 8, 8), {"a": 2, "b": 2}),
        ((8, 8), {"a": 2, "b": 2, "c": 2}),
    ],
    ids=str,
)
def test_no_order_of_steps_sends_less(sizes: tuple[int, ...], axes: dict[str, int]) -> None:
    atoms = Atoms.plain(sizes)
    layouts = [layout for layout in all_layouts(atoms, axes) if not layout.broadcast]
    rng = random.Random(11)
    sources = layouts if len(layouts) < 50 else rng.sample(layouts, 4)
    for source in sources:
        targets = layouts if len(axes) < 3 else rng.sample(layouts, 40)
        found: dict[tuple[Sharding, frozenset[str]], dict[Sharding, float]] = {}
        for target in targets:
            game = common(source, target), target.partial - source.partial
            if game not in found:
                found[game] = Exhaustive(sizes, axes, *game).distances(source)
            way = steps(atoms, source, target, axes)
            cost = sum(step.sent_numel for step in way)
            assert cost == pytest.approx(found[game][target]), f"{source} -> {target}: {text(way)}"


def common(source: Sharding, target: Sharding) -> Sharding:
    """What both layouts have: major axes of an atom, sums, and (written as B here) axes replicated in both."""
    held = []
    for one, other in zip(source.splits, target.splits, strict=True):
        same = 0
        while same < min(len(one), len(other)) and one[same] == other[same]:
            same += 1
        held.append(one[:same])
    idle = frozenset("abc") - {*source.axes, *target.axes}
    return Sharding(tuple(held), source.partial & target.partial, idle)


@pytest.mark.parametrize("seed", range(4))
def test_the_bound_of_the_search_leaves_out_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    drawn = [_conversion(draw) for _ in range(60)]
    bounded = [cheapest.__wrapped__(*given) for given in drawn]
    monkeypatch.setattr(_RemainingBound, "with_rest", lambda self, cost, extent: cost)
    assert bounded == [cheapest.__wrapped__(*given) for given in drawn]


def _conversion(draw: random.Random) -> tuple[Atoms, Sharding, Sharding, SubMesh]:
    """Sizes that axes divide or do not, sums in either layout."""
    axes = draw.choice([{"a": 2, "b": 4, "c": 3}, {"p": 2, "d": 8, "t": 8}, {"x": 4, "y": 4}])
    count = draw.randint(0, 3)
    sizes = tuple(draw.choice([prod(axes.values()), 2 * prod(axes.values()), 7, 1, 30, 0]) for _ in range(count))
    ends = []
    for _ in range(2):
        splits: list[list[str]] = [[] for _ in sizes]
        partial = set()
        for axis in draw.sample(list(axes), len(axes)):
            state = draw.choice("RRPSSS")
            if state == "P":
                partial.add(axis)
            elif state == "S" and sizes:
                draw.choice(splits).append(axis)
        ends.append(Sharding(tuple(map(tuple, splits)), frozenset(partial)))
    return Atoms(sizes, (1,) * count), *ends, SubMesh(axes)  # type: ignore[return-value]


@pytest.mark.parametrize("seed", range(4))
def test_routed_rows_have_steps_where_a_search_finds_some(seed: int) -> None:
    """The cache of scaled reshards knows without a search where the splits of groups and rows lead nowhere."""
    rng, axes = random.Random(seed), SubMesh({"dp": 2, "ep": 4, "tp": 2})
    sizes, roles, missing, found = (8, 32, 6), GROUP + ROW + OTHER, 0, 0
    atoms, scaled = Atoms(sizes, (1, 1, 1), roles=roles), ScaledReshards(axes)
    for _ in range(200):
        source, target = (drawn_sharding(rng, tuple(axes), len(sizes)) for _ in range(2))
        known = scaled.of(sizes, source, target, roles=roles)
        try:
            searched = steps(atoms, source, target, axes)
        except NoSteps:
            missing += 1
            assert known is None, (source, target)
        else:
            found += bool(searched)
            assert known is not None, (source, target)
            assert [one.kind for one in known] == [step.kind.value for step in searched], (source, target)
            assert [one.numel for one in known] == [step.numel for step in searched], (source, target)
    assert min(missing, found) > 10
