"""Rules that users add: accepted by every name of an op, checked when they are added, proved on request."""

import pytest
import torch

import autopar
from autopar.errors import RuleError
from autopar.rules import registry
from autopar.rules.call import describe_call
from autopar.rules.registry import rule_table, topics


@torch.library.custom_op("registry_test::double", mutates_args=())
def double(x: torch.Tensor, length: int) -> torch.Tensor:
    return x * 2


@torch.library.custom_op("registry_test::normalise", mutates_args=())
def normalise(x: torch.Tensor) -> torch.Tensor:
    return x.softmax(-1)


@torch.library.custom_op("registry_test::repeat", mutates_args=())
def repeat(x: torch.Tensor, length: int) -> torch.Tensor:
    return x[:, None].repeat(1, length)


@torch.library.custom_op("registry_test::split", mutates_args=())
def split(x: torch.Tensor) -> list[torch.Tensor]:
    return [x + 1, x + 2]


DOUBLE = "registry_test.double.default"


@pytest.fixture(autouse=True)
def own_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules added by one test are gone in the next."""
    monkeypatch.setattr(registry, "_registered", {})


@pytest.mark.parametrize(
    "op",
    [
        "registry_test::double",
        "registry_test::double.default",
        "registry_test.double.default",
        "registry_test.double",
        double,
        torch.ops.registry_test.double,
        torch.ops.registry_test.double.default,
    ],
    ids=str,
)
def test_every_name_of_an_op(op: object) -> None:
    autopar.register_rule(op, "b s -> b s; linear 0")
    entry = rule_table()[DOUBLE]
    assert entry.line == "registry_test::double  b s -> b s; linear 0"
    x = torch.empty(3, 4)
    assert (
        str(entry.rule(describe_call(torch.ops.registry_test.double.default, (x, 4), {}, x))) == entry.line[23:].strip()
    )


def test_the_last_rule_counts() -> None:
    autopar.register_rule(double, "b s -> b s")
    autopar.register_rule(double, "b s! -> b s!")
    assert str(rule_table()[DOUBLE].pattern) == "b s! -> b s!"


def test_a_rule_over_that_of_the_table() -> None:
    before = rule_table()["aten.relu.default"]
    autopar.register_rule("aten::relu", "a! -> a!")
    assert rule_table()["aten.relu.default"] is not before
    assert len(rule_table()) == sum(map(len, topics().values()))


def test_an_op_with_lists_takes_any_number() -> None:
    autopar.register_rule("aten::cat", "a, b, c -> d")
    autopar.register_rule(split, "a b -> a b, a b")
    assert autopar.prove_rule(split).holds


REFUSED = [
    (
        "registry_test::doubel",
        "a -> a",
        "torch knows no op 'registry_test::doubel'; did you mean 'registry_test::double'?",
    ),
    ("aten::sofmax.int", "a -> a", "torch knows no op 'aten::sofmax'; did you mean 'aten::softmax'?"),
    ("qqqqqq::zzzzzz", "a -> a", "torch knows no op 'qqqqqq::zzzzzz'; is the module that defines it imported?"),
    ("aten::relu.Tensor", "a -> a", "'aten::relu' has no overload 'Tensor'; it has default, out"),
    ("nothing", "a -> a", "torch knows no op 'nothing'; is the module that defines it imported?"),
    (3, "a -> a", "3 is no op; give its name, as in 'mylib::op', or an op of torch.ops"),
    ("registry_test::double", "a (b -> a", "this '(' is not closed\n  a (b -> a\n    ^"),
]


@pytest.mark.parametrize(("op", "rule", "message"), REFUSED, ids=[str(op) for op, _, _ in REFUSED])
def test_refused(op: object, rule: str, message: str) -> None:
    with pytest.raises(RuleError) as error:
        autopar.register_rule(op, rule)
    assert str(error.value).startswith(message)


def test_several_overloads() -> None:
    with pytest.raises(
        RuleError, match=r"'aten::add' has several overloads; say which, as in 'aten::add.Tensor': Tensor,"
    ):
        autopar.register_rule("aten::add", "a, a -> a")


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        ("a, a -> a", "the op takes 1 tensor, the rule names 2"),
        ("-> a", "the op takes 1 tensor, the rule names 0"),
        ("a -> a, a", "the op returns 1 tensor, the rule names 2"),
        ("a -> a; localise width=a", "it localises 'width', which is no argument of the op"),
        ("a -> a; localise x", "'x' cannot be localised alone; say whose extent it is, as in 'x=a'"),
        ("a -> a; lower a magic", "there is no lowering 'magic'; there are "),
    ],
)
def test_rule_against_the_schema(rule: str, reason: str) -> None:
    with pytest.raises(RuleError) as error:
        autopar.register_rule("registry_test::double", rule)
    lines = str(error.value).splitlines()
    assert lines[0].startswith(f"the rule does not fit registry_test::double: {reason}")
    assert lines[1:] == [f"  rule  {rule}", "  op    registry_test::double(Tensor x, SymInt length) -> Tensor"]


def test_a_call_that_the_rule_does_not_fit() -> None:
    autopar.register_rule(double, "b s -> b s")
    x = torch.empty(3)
    with pytest.raises(RuleError) as error:
        rule_table()[DOUBLE].rule(describe_call(torch.ops.registry_test.double.default, (x, 4), {}, x))
    assert str(error.value) == (
        "the rule does not fit the call: 'b s' has 2 dims, float32[3] has 1\n"
        "  rule  b s -> b s\n"
        "  call  registry_test.double.default(float32[3]) -> float32[3]"
    )


# -- proving one's own rule -------------------------------------------------------------------------------------------


def test_prove() -> None:
    autopar.register_rule(double, "b s -> b s")
    proof = autopar.prove_rule("registry_test::double")
    assert str(proof) == "4 cases proved, 0 failures"


def test_prove_with_own_samples() -> None:
    autopar.register_rule(repeat, "b -> b s; localise length=s")
    assert autopar.prove_rule(repeat, [(torch.randn(4, dtype=torch.float64), 6), (torch.randn(5), 3)]).holds


def test_prove_what_is_wrong() -> None:
    autopar.register_rule(normalise, "b s -> b s")
    with pytest.raises(RuleError) as error:
        autopar.prove_rule(normalise)
    assert str(error.value) == (
        "the rule of registry_test::normalise is not proved\n"
        "registry_test.normalise.default: factor s parallel: in 2 shards: output 0 differs\n"
        "  rule  b s -> b s\n"
        "  call  registry_test.normalise.default(float64[5, 7]) -> float64[5, 7]"
    )


def test_prove_what_has_no_rule() -> None:
    with pytest.raises(RuleError) as error:
        autopar.prove_rule(double)
    assert str(error.value) == (
        'registry_test::double has no rule; add one: autopar.register_rule("registry_test::double", "...")'
    )
