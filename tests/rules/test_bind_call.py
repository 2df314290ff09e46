"""Binding patterns to calls: ellipses, broadcasting, merged dims, sizes, and what a misfit says."""

import pytest
import torch

from autopar.errors import RuleError
from autopar.rules.bind_call import bind, factor_sizes, fresh_names
from autopar.rules.call import Call, TensorSpec
from autopar.rules.notation import parse_rule

Shape = tuple[int, ...] | None


def call(
    operands: list[Shape],
    outputs: list[Shape],
    dtype: torch.dtype = torch.float32,
    output_dtype: torch.dtype | None = None,
    numbers: frozenset[int] = frozenset(),
) -> Call:
    def specs(shapes: list[Shape], of: torch.dtype) -> tuple[TensorSpec | None, ...]:
        return tuple(None if shape is None else TensorSpec(shape, of) for shape in shapes)

    return Call("mylib::op", (), specs(operands, dtype), specs(outputs, output_dtype or dtype), numbers)


@pytest.mark.parametrize(
    ("pattern", "operands", "outputs", "bound"),
    [
        ("... k, n k, n? -> ... n", [(2, 3, 8), (6, 8), (6,)], [(2, 3, 6)], "a b k, n k, n -> a b n"),
        ("... k, n k, n? -> ... n", [(8,), (6, 8), None], [(6,)], "k, n k, ? -> n"),
        ("... m k, ... k n -> ... m n", [(2, 3, 4, 5), (5, 6)], [(2, 3, 4, 6)], "a b m k, k n -> a b m n"),
        ("... m k, ... k n -> ... m n", [(1, 3, 4, 5), (2, 1, 5, 6)], [(2, 3, 4, 6)], "1 b m k, a 1 k n -> a b m n"),
        ("... m, ... n -> ... m n", [(3, 4), (2, 3, 5)], [(2, 3, 4, 5)], "b m, a b n -> a b m n"),
        ("... a -> ... a", [(2, 3)], [(2, 3)], "b a -> b a"),
        ("b ... d -> b ... d", [(2, 3, 4, 5)], [(2, 3, 4, 5)], "b a c d -> b a c d"),
        ("... n! -> ... n!", [(3, 4)], [(3, 4)], "a n! -> a n!"),
        ("a b, a b -> a b", [(3, 1), (1, 4)], [(3, 4)], "a 1, 1 b -> a b"),
        ("a b, a b -> a b", [(1, 4), (1, 4)], [(1, 4)], "a b, a b -> a b"),
        ("a 1 b -> a b", [(3, 1, 4)], [(3, 4)], "a 1 b -> a b"),
        ("a (h d) -> a h d; localise size", [(3, 8)], [(3, 2, 4)], "a (h d) -> a h d; localise size"),
        ("-> a; localise size", [], [(3,)], "-> a; localise size"),
        ("a -> a", [(3,), ()], [(3,)], "a, () -> a"),
        ("a -> a, ?", [(3,)], [(3,), None], "a -> a, ?"),
        ("a -> a, ()", [(3,)], [(3,), ()], "a -> a, ()"),
        ("a, a -> a", [(3,), None], [(3,)], "a, ? -> a"),
        ("y -> y; halo y", [(9,)], [(4,)], "y -> y; halo y"),
    ],
)
def test_bound(pattern: str, operands: list[Shape], outputs: list[Shape], bound: str) -> None:
    assert str(bind(parse_rule(pattern), call(operands, outputs))) == bound


def test_clauses_about_what_is_absent_are_dropped() -> None:
    pattern = parse_rule(
        "v d, a n?, n? -> a d; mean n; linear 0 0+2; index 1 v; index 1 n; lower n masked; lower v masked;"
        "localise size length=n width=v; halo n"
    )
    bound = bind(pattern, call([(4, 5), (6, 1), None], [(6, 5)]))
    assert bound.factors == ("v", "d", "a", "n")
    bound = bind(parse_rule(str(pattern).replace("a n?", "a?")), call([(4, 5), (6,), None], [(6, 5)]))
    assert str(bound) == "v d, a, ? -> a d; linear 0; index 1 v; localise size width=v; lower v masked"


@pytest.mark.parametrize(
    ("pattern", "made", "groups"),
    [
        ("a, a -> a; linear *", call([(3,), (3,)], [(3,)]), ((0, 1),)),
        ("a, a -> a; linear *", call([(3,), None], [(3,)]), ((0,),)),
        ("a, a -> a; linear 0+1 0", call([(3,), None], [(3,)], numbers=frozenset({1})), ((0,),)),
        ("a, a -> a; linear 0+1 0", call([(3,), None], [(3,)]), ((0,),)),
        ("a -> a; linear 0", call([(3,)], [(3,)], torch.int64), ((0,),)),
        ("a -> a; linear 0", call([(3,)], [(3,)], torch.int64, torch.float32), ((0,),)),
        ("a -> a; linear 0", call([(3,)], [(3,)], torch.float32, torch.int64), ()),
        ("a -> a; linear 0", call([(3,)], [(3,)], torch.bool), ()),
        ("a -> a; linear 0", call([(3,)], [(3,)], torch.bool, torch.float32), ()),
        ("a -> a, a; linear 0", call([(3,)], [(3,), None]), ((0,),)),
    ],
)
def test_linearity_of_a_call(pattern: str, made: Call, groups: tuple[tuple[int, ...], ...]) -> None:
    """A number in place of a tensor makes the op affine, casts to integers round, booleans do not add up."""
    assert bind(parse_rule(pattern), made).linear == groups


@pytest.mark.parametrize(
    ("rule", "operands", "outputs", "sizes"),
    [
        ("a k, n k -> a n", [(2, 8), (6, 8)], [(2, 6)], {"a": 2, "k": 8, "n": 6}),
        ("a (h d) -> a h d", [(3, 8)], [(3, 2, 4)], {"a": 3, "h": 2, "d": 4}),
        ("(a b c), a, b -> c", [(24,), (2,), (3,)], [(4,)], {"a": 2, "b": 3, "c": 4}),
        ("(a b), (b c), c -> a b c", [(6,), (12,), (4,)], [(2, 3, 4)], {"a": 2, "b": 3, "c": 4}),
        ("(a b), (b c), c -> a", [(6,), (12,), (4,)], [(2,)], {"a": 2, "b": 3, "c": 4}),
        ("y -> y; halo y", [(9,)], [(4,)], {"y": 4}),
        ("a 1 -> a", [(3, 1)], [(3,)], {"a": 3}),
        ("(a b) -> a b", [(0,)], [(3, 0)], {"a": 3, "b": 0}),
    ],
)
def test_sizes(rule: str, operands: list[Shape], outputs: list[Shape], sizes: dict[str, int]) -> None:
    assert factor_sizes(parse_rule(rule), call(operands, outputs)) == sizes


MISFITS = [
    ("a b, b -> a", [(2, 3), (3,), (3, 2)], [(2,)], "the op has 3 tensor operands, the rule 2"),
    ("a -> a", [(2,)], [(2,), (2,)], "the op has 2 outputs, the rule 1"),
    ("a b -> a", [(2, 3, 4)], [(2,)], "'a b' has 2 dims, float32[2, 3, 4] has 3"),
    ("... a b -> a", [(2,)], [(2,)], "'a b' has 2 dims, float32[2] has 1"),
    ("a (b c) 1 -> a", [(2, 3)], [(2,)], "'a (b c) 1' has 3 dims, float32[2, 3] has 2"),
    ("a, ? -> a", [(2,), (3,)], [(2,)], "the rule expects no tensor where the op has float32[3]"),
    ("a b, b -> a", [(2, 3), (4,)], [(2,)], "factor 'b' is 3 in one place and 4 in another"),
    ("a 1 -> a", [(2, 3)], [(2,)], "a dim written '1' has size 3"),
    (
        "a b -> a b",
        [(2, 3)],
        [(2, 1)],
        "an output is 1 along factor 'b', which is 3 in an operand; write 1 where the op reduces it",
    ),
]


@pytest.mark.parametrize(("pattern", "operands", "outputs", "reason"), MISFITS, ids=[reason for *_, reason in MISFITS])
def test_misfit_shows_the_rule_and_the_call(
    pattern: str, operands: list[Shape], outputs: list[Shape], reason: str
) -> None:
    made = call(operands, outputs)
    with pytest.raises(RuleError) as error:
        bind(parse_rule(pattern), made)
    assert str(error.value) == f"the rule does not fit the call: {reason}\n  rule  {pattern}\n  call  {made}"


@pytest.mark.parametrize(
    ("rule", "operands", "outputs", "reason"),
    [
        ("(a b) -> a", [(7,)], [(2,)], "'(a b)' does not multiply to 7"),
        ("(a b) -> a b", [(7,)], [(2, 3)], "'(a b)' does not multiply to 7"),
        ("(a b) -> a b", [(7,)], [(0, 3)], "'(a b)' does not multiply to 7"),
        ("(a b) -> a", [(7,)], [(0,)], "'(a b)' does not multiply to 7"),
        ("(a b) -> a", [(0,)], [(0,)], "the sizes of '(a b)' do not follow from the shapes"),
        ("(a b) ->", [(6,)], [()], "the sizes of '(a b)' do not follow from the shapes"),
    ],
)
def test_sizes_that_do_not_fit(rule: str, operands: list[Shape], outputs: list[Shape], reason: str) -> None:
    made = call(operands, outputs)
    with pytest.raises(RuleError) as error:
        factor_sizes(parse_rule(rule), made)
    assert str(error.value) == f"the rule does not fit the call: {reason}\n  rule  {rule}\n  call  {made}"


def test_fresh_names_are_free() -> None:
    assert fresh_names(3, {"a", "c"}) == ["b", "d", "e"]
    assert fresh_names(28, set())[-2:] == ["a1", "b1"]
