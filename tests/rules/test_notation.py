"""The notation of rules: parsing, printing, and what the errors say."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import RuleError
from autopar.rules.notation import ELLIPSIS, FactorKind, Halo, Operand, Rule, Term, parse_clauses, parse_rule

# -- parse and print --------------------------------------------------------------------------------------------------

NAMES = ("a", "b", "c", "k", "heads", "head_dim", "n1", "_x")


@st.composite
def operands(draw: st.DrawFn) -> Operand | None:
    if draw(st.integers(0, 9)) == 0:
        return None
    factors = list(draw(st.permutations(NAMES)))[: draw(st.integers(0, 5))]
    terms: list[Term] = []
    while factors:
        width = draw(st.integers(1, 3))
        terms.append(tuple(factors[:width]))
        factors = factors[width:]
    for extra in draw(st.lists(st.just(()), max_size=2)):
        terms.insert(draw(st.integers(0, len(terms))), extra)
    if draw(st.booleans()):
        terms.insert(draw(st.integers(0, len(terms))), ELLIPSIS)
    return Operand(tuple(terms), optional=draw(st.booleans()))


def some(draw: st.DrawFn, names: list[str]) -> tuple[str, ...]:
    return tuple(draw(st.lists(st.sampled_from(names), unique=True, max_size=3))) if names else ()


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    left = tuple(draw(st.lists(operands(), max_size=4)))
    right = tuple(draw(st.lists(operands(), min_size=1, max_size=3)))
    names = sorted({name for operand in (*left, *right) if operand for name in operand.factors})
    contractions = st.sampled_from([FactorKind.SUM, FactorKind.MEAN, FactorKind.MAX, FactorKind.MIN])
    halo = st.none() | st.builds(Halo, st.integers(1, 9), st.integers(1, 3), st.integers(-2, 4), st.integers(1, 3))
    numbers = st.integers(0, len(left) - 1) if left else st.nothing()
    groups = st.lists(numbers, min_size=1, max_size=3).map(tuple) if left else st.nothing()
    words = st.sampled_from(["size", "shape", "dim"])
    return Rule(
        left,
        right,
        whole=frozenset(some(draw, names)),
        contracted=tuple((name, draw(contractions)) for name in some(draw, names)),
        halos=tuple((name, draw(halo)) for name in some(draw, names)),
        linear=tuple(draw(st.lists(groups, max_size=3))) if left else (),
        linear_in_all=draw(st.booleans()),
        indices=tuple((draw(numbers), name) for name in some(draw, names)) if left else (),
        localise=tuple(draw(st.lists(words, max_size=2))) + tuple(f"length={name}" for name in some(draw, names)),
        lowerings=tuple((name, draw(st.sampled_from(["masked", "window"]))) for name in some(draw, names)),
        random=draw(st.booleans()),
    )


@given(rules())
def test_parse_undoes_print(rule: Rule) -> None:
    text = str(rule)
    assert parse_rule(text) == rule
    assert str(parse_rule(text)) == text


@given(rules(), st.sampled_from(["  ", "\t"]))
def test_spaces_do_not_matter(rule: Rule, space: str) -> None:
    wide = str(rule).replace(" ", space).replace(",", " , ").replace(";", " ;")
    assert parse_rule(wide) == rule


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("...k,n k ,n? -> ... n", "... k, n k, n? -> ... n"),
        ("a b->", "a b ->"),
        ("->", "->"),
        (" -> a", "-> a"),
        ("(), a -> a", "(), a -> a"),
        (", a -> a", "(), a -> a"),
        ("a -> a, ()", "a -> a, ()"),
        ("a,?->?, a", "a, ? -> ?, a"),
        ("()?, a -> a", "()?, a -> a"),
        ("(a) -> a", "a -> a"),
        ("b 1 ( h  d! ) -> b (h d!)", "b 1 (h d!) -> b (h d!)"),
        ("a! b -> a b", "a! b -> a! b"),
        ("a b -> a; mean b", "a b -> a; mean b"),
        ("a b -> ; max a ; min b", "a b ->; max a; min b"),
        ("a b ->; mean a; mean b", "a b ->; mean a b"),
        ("a -> a; linear 0; linear *", "a -> a; linear 0; linear *"),
        ("y -> y; halo y kernel=3 padding=1", "y -> y; halo y kernel=3 stride=1 padding=1 dilation=1"),
        ("y -> y; halo y", "y -> y; halo y"),
        ("a, b -> a b; linear 0+1 1", "a, b -> a b; linear 0+1 1"),
        ("v d, a -> a d; index 1 v; lower v masked", "v d, a -> a d; index 1 v; lower v masked"),
        ("a -> a b; localise size length=b; random", "a -> a b; localise size length=b; random"),
    ],
)
def test_normal_form(text: str, normal: str) -> None:
    assert str(parse_rule(text)) == normal


def test_nothing_right_of_the_arrow_is_one_scalar() -> None:
    assert parse_rule("a ->").outputs == (Operand(()),)
    assert parse_rule("-> a").operands == ()
    assert parse_rule("() ->").operands == (Operand(()),)


# -- what a rule says -------------------------------------------------------------------------------------------------


def test_kinds() -> None:
    rule = parse_rule("b k w! y, k m x -> b y m new; mean m; max x; halo y")
    assert {name: kind.value for name, kind in rule.kinds.items()} == {
        "b": "parallel",
        "k": "sum",
        "w": "whole",
        "y": "halo",
        "m": "parallel",
        "x": "max",
        "new": "parallel",
    }


def test_outcome_of_each_output() -> None:
    rule = parse_rule("a b c -> a b, b, ?; sum a")
    assert rule.outcome(0, "a") is FactorKind.PARALLEL
    assert rule.outcome(1, "a") is FactorKind.SUM
    assert rule.outcome(1, "b") is FactorKind.PARALLEL
    assert rule.outcome(0, "c") is FactorKind.SUM
    assert parse_rule("a b -> a b, b").outcome(1, "a") is None


def test_operands_that_only_one_shard_may_add() -> None:
    rule = parse_rule("a k, n k, n -> a n; linear 0+2 1+2")
    assert rule.added_operands("k") == {2}
    assert parse_rule("a k, k n -> a n; linear 0 1").added_operands("k") == set()


def test_clauses_of_a_line_join_the_dims_of_a_call() -> None:
    clauses = parse_clauses("mean a z; linear 0; localise size length=z; lower z masked; index 0 a")
    rule = parse_rule("a b -> b; localise size").with_clauses(clauses)
    assert str(rule) == "a b -> b; mean a; linear 0; index 0 a; localise size"


def test_own_clauses_come_first() -> None:
    rule = parse_rule("a b -> b; max a; linear 0").with_clauses(parse_clauses("mean a; linear *; random"))
    assert str(rule) == "a b -> b; max a; linear 0; linear *; random"


def test_no_clauses() -> None:
    assert parse_clauses("  ") == Rule((), ())


def test_halo_of_one_point_is_pointwise() -> None:
    assert Halo(kernel=1).pointwise
    assert not Halo(kernel=1, stride=2).pointwise


# -- errors -----------------------------------------------------------------------------------------------------------

ALL_CLAUSES = "clauses are sum, mean, max, min, halo, linear, index, localise, lower, random"

ERRORS = [
    ("a b", 0, "a rule has one '->' between its operands and its outputs, as in 'b s d, f d -> b s f'"),
    ("a -> b -> c", 0, "a rule has one '->' between its operands and its outputs, as in 'b s d, f d -> b s f'"),
    ("a, (b c -> a", 3, "this '(' is not closed"),
    ("a b) -> a", 3, "')' cannot stand here"),
    ("a ((b) -> a", 3, "'(' cannot stand here"),
    ("a () b -> a", 3, "')' cannot stand here"),
    ("(a 1) -> a", 3, "'1' cannot stand here"),
    ("(a ...) -> a", 3, "'...' cannot stand here"),
    ("... a ... -> a", 6, "'...' cannot stand here"),
    ("a$ -> a", 1, "'$' cannot stand here"),
    ("! a -> a", 0, "'!' cannot stand here"),
    ("a!! -> a", 2, "'!' cannot stand here"),
    ("2 -> a", 0, "'2' cannot stand here"),
    ("a -> a, b.c", 9, "'.' cannot stand here"),
    ("a? b -> a", 3, "'?' stands after the last term of an operand"),
    ("a b, c a c -> a", 9, "factor 'c' stands twice in one operand; name its two dims apart"),
    ("a -> a (b a)", 10, "factor 'a' stands twice in one operand; name its two dims apart"),
    ("a -> a;", 7, "empty clause after ';'"),
    ("a -> a; ; random", 8, "empty clause after ';'"),
    ("a -> a; mean", 8, f"clause 'mean' is unknown or lacks its words; {ALL_CLAUSES}"),
    ("a -> a; nonsense", 8, f"clause 'nonsense' is unknown or lacks its words; {ALL_CLAUSES}"),
    ("a -> a; divide a", 8, f"clause 'divide a' is not understood; {ALL_CLAUSES}"),
    ("a -> a; random a", 8, f"clause 'random a' is not understood; {ALL_CLAUSES}"),
    ("a -> a; index a a", 8, f"clause 'index a a' is not understood; {ALL_CLAUSES}"),
    ("a -> a; lower a", 8, f"clause 'lower a' is not understood; {ALL_CLAUSES}"),
    ("a b -> a; mean c", 10, "the clause names 'c', which is no factor of this rule"),
    ("a -> a; halo z", 8, "the clause names 'z', which is no factor of this rule"),
    ("a -> a; lower z masked", 8, "the clause names 'z', which is no factor of this rule"),
    ("a -> a; index 0 z", 8, "the clause names 'z', which is no factor of this rule"),
    ("a -> a; localise length=z", 8, "the clause names 'z', which is no factor of this rule"),
    ("a -> a; index 1 a", 8, "the clause names operand 1, but the rule has 1 (the first is 0)"),
    ("a b -> ; mean a; max a", 17, "factor 'a' stands twice in clauses of this kind"),
    ("a -> a; halo a; halo a", 16, "factor 'a' stands twice in clauses of this kind"),
    ("a -> a; lower a x; lower a y", 19, "factor 'a' stands twice in clauses of this kind"),
    ("a -> a; localise 3", 8, "'3' in a localise clause; expected an argument, as in 'size' or 'length=s'"),
    ("a -> a; localise size=", 8, "'size=' in a localise clause; expected an argument, as in 'size' or 'length=s'"),
    ("a -> a; linear 1", 8, "'1' in a linear clause; expected operand numbers below 1, as in '0' or '0+2'"),
    ("a -> a; linear 0+", 8, "'0+' in a linear clause; expected operand numbers below 1, as in '0' or '0+2'"),
    ("a -> a; linear x", 8, "'x' in a linear clause; expected operand numbers below 1, as in '0' or '0+2'"),
    (
        "a -> a; halo a wide=3",
        8,
        "'wide=3' in a halo clause; expected kernel=3 stride=1 padding=1 dilation=1",
    ),
    (
        "a -> a; halo a kernel=x",
        8,
        "'kernel=x' in a halo clause; expected kernel=3 stride=1 padding=1 dilation=1",
    ),
    ("a -> a; halo a stride=2", 8, "a halo clause with geometry needs kernel="),
]


@pytest.mark.parametrize(("text", "column", "message"), ERRORS, ids=[text for text, _, _ in ERRORS])
def test_error_shows_the_rule_and_the_place(text: str, column: int, message: str) -> None:
    with pytest.raises(RuleError) as error:
        parse_rule(text)
    assert str(error.value) == f"{message}\n  {text}\n  {' ' * column}^"


@pytest.mark.parametrize(
    ("parse", "text"), [(parse_clauses, "mean b; linear 7; index 3 v; localise n=q"), (parse_rule, "a b -> a; mean b")]
)
def test_clauses_alone_are_not_checked_against_dims(parse: Callable[[str], Rule], text: str) -> None:
    parse(text)


@given(st.text(alphabet="ab ()!?.,->;1+=*0", max_size=24))
def test_any_text_parses_or_is_a_rule_error(text: str) -> None:
    try:
        rule = parse_rule(text)
    except RuleError:
        return
    assert parse_rule(str(rule)) == rule
