"""Rules found by running ops in shards, for ops that have none."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from autopar.rules.call import Call, describe_call, resolve_op
from autopar.rules.notation import FactorKind, Rule
from autopar.rules.proof import discover as discover_module
from autopar.rules.proof.discover import Discoveries, Labels, discover, no_rule_message
from autopar.rules.proof.run_shards import materialise
from autopar.rules.registry import rule_table


def custom(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.library.custom_op(f"discover_test::{function.__name__}", function, mutates_args=())


@custom
def pointwise(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.exp() * y


@custom
def normalised(x: torch.Tensor) -> torch.Tensor:
    return x.softmax(1)


@custom
def product(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return torch.nn.functional.linear(x, w, bias)


@custom
def largest(x: torch.Tensor) -> torch.Tensor:
    return x.amax(0)


@custom
def average(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.exp(), x.exp().mean(0)


@custom
def merged(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).flatten(1).exp()


@custom
def doubled_rows(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x.exp()])


@custom
def rows_at(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return table[ids.long()]


@custom
def mixed(x: torch.Tensor) -> torch.Tensor:
    return x.flatten().softmax(0).reshape(x.shape)


@custom
def failing(x: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError("there is a kernel for other devices only")


@custom
def only_single(x: torch.Tensor) -> torch.Tensor:
    if x.dtype is not torch.float32:
        raise TypeError("float32 only")
    return x.exp()


@custom
def only_eights(x: torch.Tensor) -> torch.Tensor:
    if x.shape[-1] % 4:
        raise ValueError("the last dim is a multiple of 4")
    return x.reshape(*x.shape[:-1], -1, 4).softmax(-1).reshape(x.shape)


@custom
def columns(x: torch.Tensor, length: int) -> torch.Tensor:
    if x.shape[0] != length:
        raise ValueError("length is that of x")
    return x.exp()


@custom
def keeps_ones(x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] != 1:
        raise ValueError("one row, please")
    return x.exp()


@custom
def noisy(x: torch.Tensor) -> torch.Tensor:
    return torch.rand_like(x) * x


@custom
def clipped(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-6, 6)


def ask(name: str, labels: Labels, *args: Any) -> tuple[torch._ops.OpOverload, Call, Labels]:
    op = getattr(torch.ops.discover_test, name).default
    try:
        result = op(*args)
    except (NotImplementedError, ValueError):
        result = torch.empty_like(args[0])
    split = [label.split() if isinstance(label, str) else label for label in labels]
    return op, describe_call(op, args, {}, result), split


R = torch.randn

FOUND = [
    ("pointwise", ["b s", "b s"], (R(4, 6), R(4, 6)), "a b, a b -> a b; linear 1"),
    ("pointwise", ["b s", "one s"], (R(4, 6), R(1, 6)), "a b, c! b -> a b; linear 1"),
    ("normalised", ["b s"], (R(4, 6),), "a b! -> a b!"),
    ("product", ["b s k", "n k", None], (R(2, 4, 6), R(5, 6), None), "a b c, d c, ? -> a b d; linear 0 1"),
    ("product", ["b k", "n k", "n"], (R(4, 6), R(5, 6), R(5)), "a b, c b, c -> a c; linear 0+2 1+2"),
    ("largest", ["b s"], (R(4, 6),), "a b -> b; max a"),
    ("average", ["b s"], (R(4, 6),), "a b -> a b, b; mean a"),
    ("merged", ["a b c"], (R(2, 3, 4),), "a b c -> a (c b)"),
    ("doubled_rows", ["a b"], (R(2, 3),), "a b -> (c! a) b"),
    ("rows_at", ["v d", "b s"], (R(9, 4), torch.zeros(2, 3, dtype=torch.int64)), "a! b, c d -> c d b; linear 0"),
    ("rows_at", ["v d", "b"], (R(9, 4), torch.zeros(2, dtype=torch.int32)), "a! b, c -> c b; linear 0"),
    ("only_single", ["a b"], (R(2, 3),), "a b -> a b"),
    ("only_eights", ["a b"], (R(6, 8),), "a b! -> a b!"),
    ("columns", ["n"], (R(6), 6), "a -> a; localise length=a"),
    ("keeps_ones", ["a b"], (R(1, 5),), "a! b -> 1 b"),
    ("noisy", ["a b"], (R(4, 5),), "a b -> a b; linear 0; random"),
    ("clipped", ["a b"], (R(4, 5),), "a b -> a b"),
]


@pytest.mark.parametrize(("name", "labels", "args", "rule"), FOUND)
def test_found(name: str, labels: Labels, args: tuple[Any, ...], rule: str) -> None:
    found = discover(*ask(name, labels, *args))
    assert str(found) == rule
    hash(found)  # ops are told apart by their rules


def test_nothing_can_be_split() -> None:
    assert discover(*ask("mixed", ["a b"], R(4, 5))) is None


def test_the_op_does_not_run() -> None:
    assert discover(*ask("failing", ["a b"], R(4, 5))) is None


def test_no_dims() -> None:
    assert discover(*ask("clipped", [""], R(()))) is None


def test_one_label_twice_on_one_tensor() -> None:
    assert discover(*ask("clipped", ["a a"], R(4, 4))) is None


def test_op_that_mutates() -> None:
    op, x = torch.ops.aten.add_.Tensor, R(4, 5)
    assert discover(op, describe_call(op, (x, x), {}, x), [["a", "b"], ["a", "b"]]) is None


def test_too_large_for_its_own_sizes() -> None:
    """It runs on multiples of 4 only, so not on small sizes, and its own are too many elements to try."""
    x = torch.empty(1000, 2000, device="meta")
    op = torch.ops.discover_test.only_eights.default
    assert discover(op, describe_call(op, (x,), {}, x), [["a", "b"]]) is None


def test_random_state_is_left_alone() -> None:
    question = ask("noisy", ["a b"], R(4, 5))
    before = torch.random.get_rng_state()
    discover(*question)
    assert torch.equal(before, torch.random.get_rng_state())


# -- the cache --------------------------------------------------------------------------------------------------------


def test_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    original = discover_module._discover

    def counted(request: Any) -> Any:
        asked.append(str(request.call))
        return original(request)

    monkeypatch.setattr(discover_module, "_discover", counted)
    discoveries = Discoveries()
    first = discoveries(*ask("pointwise", ["b s", "b s"], R(4, 6), R(4, 6)))
    assert discoveries(*ask("pointwise", ["x y", "x y"], R(9, 3), R(9, 3))) == first
    assert len(asked) == 1
    discoveries(*ask("pointwise", ["b s", "c s"], R(4, 6), R(1, 6)))
    discoveries(*ask("pointwise", ["s", "s"], R(4), R(4)))
    discoveries(*ask("failing", ["a"], R(4)))
    discoveries(*ask("failing", ["a"], R(4)))
    assert len(asked) == 4
    discoveries(*ask("columns", ["n"], R(6), 6))
    discoveries(*ask("columns", ["n"], R(8), 8))
    assert len(asked) == 6  # another number is another call


def test_what_was_found_at_its_own_sizes_is_for_these_sizes() -> None:
    discoveries = Discoveries()
    assert str(discoveries(*ask("only_eights", ["a b"], R(6, 8)))) == "a b! -> a b!"
    assert str(discoveries(*ask("only_eights", ["a b"], R(2, 8)))) == "a b! -> a b!"
    assert len(discoveries.rules) == 2


# -- the message ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("question", "call", "line"),
    [
        (
            ask("mixed", ["a b"], R(4, 5)),
            "mixed(float32[4, 5]) -> float32[4, 5]",
            '"discover_test::mixed", "a b -> a b"',
        ),
        (
            ask("product", ["b k", "n k", None], R(4, 6), R(5, 6), None),
            "product(float32[4, 6], float32[5, 6], -) -> float32[4, 5]",
            '"discover_test::product", "a b, c b, ? -> a c"',
        ),
        (
            ask("largest", ["b"], R(4)),
            "largest(float32[4]) -> float32[]",
            '"discover_test::largest", "a ->"',
        ),
        (
            ask("merged", ["a b c"], R(2, 3, 4)),
            "merged(float32[2, 3, 4]) -> float32[2, 12]",
            '"discover_test::merged", "a b c -> a d"',
        ),
    ],
)
def test_message(question: tuple[torch._ops.OpOverload, Call, Labels], call: str, line: str) -> None:
    assert no_rule_message(*question) == (
        f"no rule for discover_test::{call}, and none found by running it in shards; "
        "it will run replicated on every device.\n"
        "If it can be split, add a rule, for instance (its dims here are guessed from their extents):\n"
        f"  autopar.register_rule({line})"
    )


# -- against the table ------------------------------------------------------------------------------------------------

HIDDEN = """
aten.add.Tensor aten.mul.Tensor aten.where.self aten.gelu.default aten.clamp.default aten.eq.Tensor
aten.linear.default aten.matmul.default aten.bmm.default aten.addmm.default aten.softmax.int aten.cumsum.default
aten.sum.dim_IntList aten.mean.dim aten.amax.default aten.argmax.default aten.any.dim aten.var.correction
aten.layer_norm.default aten.group_norm.default aten.scaled_dot_product_attention.default
aten.embedding.default aten.index_select.default aten.gather.default aten.cat.default aten.stack.default
aten.transpose.int aten.permute.default aten.flip.default aten.sort.default aten.topk.default
"""


def labels_of(rule: Rule) -> Labels:
    return [
        None if operand is None else [" ".join(term) or f"one {i} {dim}" for dim, term in enumerate(operand.terms)]
        for i, operand in enumerate(rule.operands)
    ]


def kinds_of_dims(rule: Rule) -> dict[tuple[int, int], FactorKind | None]:
    """The kind of each operand dim; None where it is no single factor, or needs a lowering or neighbours."""
    kinds: dict[tuple[int, int], FactorKind | None] = {}
    for i, operand in enumerate(rule.operands):
        for dim, term in enumerate(operand.terms if operand else ()):
            simple = len(term) == 1 and not rule.lowering(term[0]) and rule.kinds[term[0]] is not FactorKind.HALO
            kinds[i, dim] = rule.kinds[term[0]] if simple else None
    return kinds


@pytest.mark.parametrize("name", HIDDEN.split())
def test_finds_what_the_table_says(name: str) -> None:
    entry, op = rule_table()[name], resolve_op(name)
    compared = 0
    for sample in list(entry.samples(op))[:6]:
        arguments = materialise(op, sample, 0)
        if arguments.get("sparse"):
            continue  # only the line of the table makes the gradients of shards dense
        try:
            call = describe_call(op, (), arguments, op(**arguments))
        except RuntimeError:
            continue  # the proof reports calls that the op refuses
        expected = entry.rule(call)
        found = discover(op, call, labels_of(expected))
        splittable = [kind for kind in expected.kinds.values() if kind is not FactorKind.WHOLE]
        if found is None:
            assert not splittable, f"{call}: {expected}"
            continue
        table, kinds = kinds_of_dims(expected), kinds_of_dims(found)
        simple = [dim for dim in table if table[dim] is not None and kinds[dim] is not None]
        assert [table[dim] for dim in simple] == [kinds[dim] for dim in simple], f"{expected}\n{found}\n{call}"
        compared += len(simple)
    assert compared
