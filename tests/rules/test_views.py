"""The common refinement of two shapes, against brute force: which element goes where."""

from __future__ import annotations

from itertools import pairwise, product
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.rules.bind_call import bind, factor_sizes
from autopar.rules.call import Call, TensorSpec
from autopar.rules.notation import FactorKind, Rule, Term, parse_rule
from autopar.rules.ops.view import FAMILIES, refine
from autopar.rules.proof.prove import prove_entry
from autopar.rules.table import parse_entry

factors = st.lists(st.integers(1, 4), min_size=0, max_size=6)


@st.composite
def regrouped(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes that merge neighbours of one list of factors."""
    sizes = draw(factors)

    def merged() -> tuple[int, ...]:
        cuts = sorted(draw(st.sets(st.integers(1, max(len(sizes) - 1, 1)))) | {0, len(sizes)})
        return tuple(prod(sizes[start:stop]) for start, stop in pairwise(cuts))

    return merged(), merged()


@st.composite
def unrelated(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes with equally many elements: divisors taken one after the other."""
    total = draw(st.sampled_from([1, 12, 30, 36, 48, 60, 72, 210]))

    def cut() -> tuple[int, ...]:
        rest, shape = total, []
        while rest > 1 or draw(st.booleans()):
            shape.append(draw(st.sampled_from([d for d in range(1, rest + 1) if rest % d == 0])))
            rest //= shape[-1]
            if len(shape) == 6:
                break
        return (*shape, rest) if rest > 1 else tuple(shape)

    return cut(), cut()


def bound(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[Rule, dict[str, int]]:
    before, after = (" ".join(dims) or "()" for dims in refine(left, right))
    specs = [(TensorSpec(shape, torch.float32),) for shape in (left, right)]
    call = Call("aten.reshape.default", (), *specs)
    rule = bind(parse_rule(f"{before} -> {after}"), call)
    return rule, factor_sizes(rule, call)


def coordinates(place: tuple[int, ...], terms: tuple[Term, ...], sizes: dict[str, int]) -> dict[str, int]:
    """Where a place stands along each factor, counted out by hand."""
    found: dict[str, int] = {}
    for position, term in zip(place, terms, strict=True):
        for name in reversed(term):
            position, found[name] = divmod(position, sizes[name])
        assert position == 0, "the factors of a dim multiply to its extent"
    return found


def check_elements(left: tuple[int, ...], right: tuple[int, ...]) -> Rule:
    """Every element keeps its coordinate along every factor that may be split."""
    rule, sizes = bound(left, right)
    assert rule.operands[0] is not None
    assert rule.outputs[0] is not None
    split = [name for name, kind in rule.kinds.items() if kind is FactorKind.PARALLEL]
    places = zip(product(*map(range, left)), product(*map(range, right)), strict=True)
    for before, after in places:  # both in memory order: the same element
        source = coordinates(before, rule.operands[0].terms, sizes)
        target = coordinates(after, rule.outputs[0].terms, sizes)
        assert [source[name] for name in split] == [target[name] for name in split]
    assert {name for name, kind in rule.kinds.items() if kind is not FactorKind.PARALLEL} == rule.whole
    return rule


@given(regrouped())
def test_random_merges_and_splits_lose_no_factor(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    rule = check_elements(*shapes)
    ends = {prod(shape[: i + 1]) for shape in shapes for i in range(len(shape)) if shape[i] > 1}
    _, sizes = bound(*shapes)
    assert not rule.whole
    assert sum(size > 1 for size in sizes.values()) == len(ends)


@given(unrelated())
def test_random_shapes_split_no_factor_that_moves(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    rule = check_elements(*shapes)
    ends = sorted({prod(shape[: i + 1]) for shape in shapes for i in range(len(shape))})
    if all(later % earlier == 0 for earlier, later in pairwise(ends)):
        assert not rule.whole


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ((5, 12), (5, 3, 4), "a (b c) -> a b c"),
        ((4, 24), (8, 12), "a (b c) -> (a b) c"),
        ((6, 35), (15, 14), "a! b! -> c! d!"),
        ((3, 6, 4, 5), (3, 4, 6, 5), "a b! c! f -> a d! e! f"),
        ((1, 10, 48), (1, 10, 4, 12), "d a (b c) -> d a b c"),
        ((1, 10), (1, 1, 10), "1 a -> 1 1 a"),
        ((4, 1, 6), (24,), "a 1 b -> (a b)"),
        ((4, 1, 6), (2, 2, 1, 6), "(a b) d c -> a b d c"),
        ((), (1, 1), "() -> 1 1"),
        ((3, 0, 4), (3, 0, 2, 2), "a b c! -> a b d! e!"),
    ],
)
def test_how_a_view_is_written(left: tuple[int, ...], right: tuple[int, ...], expected: str) -> None:
    before, after = (" ".join(dims) or "()" for dims in refine(left, right))
    assert f"{before} -> {after}" == expected


def test_a_shard_of_size_one_is_not_squeezed_away() -> None:
    assert prove_entry(parse_entry("aten.squeeze.dim", "squeeze; linear 0; localise as_reshape", FAMILIES)).holds
    proof = prove_entry(parse_entry("aten.squeeze.dim", "squeeze; linear 0", FAMILIES))
    assert any("of a shard is [1, 2], not [1, 1, 2]" in failure.reason for failure in proof.failures)
