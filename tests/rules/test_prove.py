"""The whole table is proved by execution, and wrong rules are not."""

import re
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import torch

from autopar.errors import RuleError
from autopar.rules.call import Call
from autopar.rules.proof.prove import Proof, prove_entry
from autopar.rules.proof.samples import Draw, Sample, Tries
from autopar.rules.registry import rule_table
from autopar.rules.shard_call.dispatch import LOWERINGS
from autopar.rules.shard_call.local_call import FactorSlice, LocalCall
from autopar.rules.table import OpFamily, TableEntry, parse_entry

# -- the table --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", [pytest.param(entry, id=op) for op, entry in rule_table().items()])
def test_line(entry: TableEntry, record_property: Callable[[str, object], None]) -> None:
    if entry.tries.needs:
        pytest.importorskip(entry.tries.needs)
    proof = prove_entry(entry)
    assert proof.holds, str(proof)
    record_property("proved_cases", len(proof.cases))


# -- wrong rules ------------------------------------------------------------------------------------------------------


def prove(line: str, **families: OpFamily) -> Proof:
    op, _, body = line.partition(" ")
    return prove_entry(parse_entry(op, body.strip(), families))


def reasons(proof: Proof) -> list[str]:
    return [f"{failure.subject}: {failure.reason}" for failure in proof.failures]


WRONG = {
    "a dim that is normalised": (
        "aten.softmax.int  ... n -> ... n; try dim=-1",
        "factor n parallel: in 2 shards: output 0 differs",
    ),
    "a maximum summed": (
        "aten.amax.default  a b -> a; try dim=[1]",
        "factor b sum: in 2 shards: output 0 differs",
    ),
    "booleans summed": (
        "aten.any.dim  a b -> a; try bool dim=1",
        r"factor b sum: in 2 shards: output 0 comes back as int64\[5\], not bool\[5\]",
    ),
    "a mean summed": (
        "aten.mean.dim  a b -> a; linear 0; try dim=[1]",
        "factor b sum: in 2 shards: output 0 differs",
    ),
    "a sum averaged": (
        "aten.sum.dim_IntList  a b -> a; mean b; linear 0; try dim=[1]",
        "factor b mean: in 2 shards: output 0 differs",
    ),
    "whole for nothing": (
        "aten.sigmoid.default  ... n! -> ... n!",
        r"factor n whole: it is marked whole \(!\), but can be split in 2",
    ),
    "whole for nothing, contracted": (
        "aten.amin.default  a b! -> a; try dim=[1]",
        r"factor b whole: it is marked whole \(!\), but can be split in 2",
    ),
    "linear where it is not": (
        "aten.relu.default  ... n -> ... n; linear 0",
        "linear in 0: in 2 shards: output 0 differs",
    ),
    "linear apart where it is linear together": (
        "aten.maximum.default  a b, a b -> a b; linear 0+1",
        "linear in 0[+]1: in 2 shards: output 0 differs",
    ),
    "linearity not declared": (
        "aten.neg.default  ... n -> ... n",
        "not linear in 0: it is linear in 0, which the rule does not say",
    ),
    "linearity declared in one operand only": (
        "aten.mul.Tensor  a b, a b -> a b; linear 0",
        "not linear in 1: it is linear in 1, which the rule does not say",
    ),
    "linearity together not declared": (
        "aten.add.Tensor  a b, a b -> a b",
        "not linear in 0[+]1: it is linear in 0[+]1, which the rule does not say",
    ),
    "minor before major": (
        "aten.flatten.using_ints  a b c -> a (c b); linear 0; try start_dim=1",
        "factor b parallel: in 2 shards: output 0 differs",
    ),
    "dims in the wrong order": (
        "aten.mm.default  m k, k n -> n m; linear 0 1",
        "binding: the rule does not fit the call: factor 'n' is 4 in one place and 5 in another",
    ),
    "rows looked up without a lowering": (
        "aten.embedding.default  v d, a -> a d; linear 0; index 1 v",
        "factor v sum: in 2 shards: the shards do not run: index out of range",
    ),
    "a bias added by every shard": (
        "aten.linear.default  a k, n k, n? -> a n; linear 0 1",
        "factor k sum: in 2 shards: output 0 differs",
    ),
    "a size that does not follow": (
        "aten.view.default  a b -> b a; linear 0; try size=[7,5]",
        "factor a parallel: in 2 shards: the shards do not run: shape",
    ),
    "random, not said": (
        "aten.dropout.default  a b -> a b; linear 0; try p=0.5 train=True",
        "factor a parallel: in 2 shards: output 0 differs",
    ),
    "random where nothing is drawn": (
        "aten.exp.default  a b -> a b; random",
        "random: no call of its samples draws anything",
    ),
    "a maximum of booleans that is a minimum": (
        "aten.any.default  a b ->; min a b; try one_true",
        "factor a min: in 2 shards: output 0 differs",
    ),
    "whole where numbers are drawn for each element": (
        "aten.bernoulli.default  a b! -> a b!; random; try probability",
        r"factor b whole: it is marked whole \(!\), but can be split in 2",
    ),
    "a localiser that is not": (
        "aten.neg.default  a b -> a b; linear 0; localise foo",
        "samples: the rule names 'foo', which is no localiser or lowering",
    ),
    "a lowering that is not": (
        "aten.neg.default  a b -> a b; linear 0; lower a foo",
        "samples: the rule names 'foo', which is no localiser or lowering",
    ),
    "an op that refuses every call": (
        "aten.mm.default  a b c, c d -> a b d; linear 0 1",
        "samples: nothing is proved: aten.mm.default: (mm: )?self must be a matrix",
    ),
    "operands outside the domain": (
        "aten.acosh.default  a b -> a b; try unit",
        "samples: all outputs are NaN; a 'try' clause gives the operands that the op is made for",
    ),
    "nothing to split": (
        "aten.isnan.default  1 -> 1",
        "samples: nothing is proved: its samples have nothing to split",
    ),
}


@pytest.mark.parametrize(("line", "reason"), WRONG.values(), ids=WRONG.keys())
def test_wrong_rule_fails(line: str, reason: str) -> None:
    proof = prove(line)
    assert not proof.holds
    assert any(re.match(reason, found) for found in reasons(proof)), "\n".join(reasons(proof)) or "it holds"


def test_right_neighbours_of_the_wrong_rules_hold() -> None:
    for line in (
        "aten.softmax.int  ... n! -> ... n!; try dim=-1",
        "aten.any.dim  a b -> a; max b; try bool dim=1",
        "aten.mean.dim  a b -> a; mean b; linear 0; try dim=[1]",
        "aten.maximum.default  a b, a b -> a b",
        "aten.flatten.using_ints  a b c -> a (b c); linear 0; try start_dim=1",
        "aten.mm.default  m k, k n -> m n; linear 0 1",
        "aten.linear.default  a k, n k, n? -> a n; linear 0+2 1+2",
        "aten.dropout.default  a b -> a b; linear 0; random; try p=0.5 train=True",
    ):
        proof = prove(line)
        assert proof.holds, str(proof)


def test_failure_shows_the_rule_and_the_call() -> None:
    (failure,) = prove("aten.amax.default  a b -> a; try dim=[1]").failures
    assert str(failure) == (
        "aten.amax.default: factor b sum: in 2 shards: output 0 differs\n"
        "  rule  a b -> a\n"
        "  call  aten.amax.default(float64[5, 7]) -> float64[5]"
    )


def test_line_for_an_op_that_torch_lacks() -> None:
    with pytest.raises(
        RuleError, match=r"the table has a rule for 'aten.no_such_op.default', which torch does not know"
    ):
        prove("aten.no_such_op.default  a -> a")


# -- ops made to mislead ----------------------------------------------------------------------------------------------


@torch.library.custom_op("proof_test::scaled_gradient", mutates_args=())
def scaled_gradient(x: torch.Tensor) -> torch.Tensor:
    """Elementwise forward; a backward that depends on the size, as that of a wrong kernel would."""
    return x * 2


scaled_gradient.register_autograd(lambda ctx, gradient: gradient * gradient.shape[0])


@torch.library.custom_op("proof_test::and_total", mutates_args=())
def and_total(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.exp(), x.exp().sum(0)


@torch.library.custom_op("proof_test::noise_by_size", mutates_args=())
def noise_by_size(x: torch.Tensor) -> torch.Tensor:
    return torch.rand_like(x) * x.shape[0]


@torch.library.custom_op("proof_test::levels_by_size", mutates_args=())
def levels_by_size(x: torch.Tensor) -> torch.Tensor:
    return torch.randint_like(x, 0, 2) if x.shape[0] > 4 else torch.randint_like(x, 0, 3) / 2


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (
            "proof_test.scaled_gradient.default  a b -> a b; linear 0",
            "factor a parallel: in 2 shards: the gradient of float operand 0 differs",
        ),
        (
            "proof_test.and_total.default  a b -> a b, b",
            "factor a parallel: in 2 shards: the shards do not run: output 1 lacks the factor, but is not the same",
        ),
        ("proof_test.and_total.default  a b -> a b, b; mean a", "factor a parallel: in 2 shards: output 1 differs"),
        ("proof_test.and_total.default  a! b -> a! b, b", r"factor a whole: it is marked whole \(!\), but can be"),
        (
            "proof_test.noise_by_size.default  a b -> a b; random",
            "factor a parallel: in 2 shards: output 0 is drawn from another distribution",
        ),
        (
            "proof_test.levels_by_size.default  a b -> a b; random",
            "factor a parallel: in 2 shards: output 0 takes other values",
        ),
    ],
)
def test_misleading_op_fails(line: str, reason: str) -> None:
    found = reasons(prove(line))
    assert any(re.match(reason, text) for text in found), "\n".join(found) or "it holds"


def test_outputs_of_two_kinds() -> None:
    assert prove("proof_test.and_total.default  a b -> a b, b; sum a").holds


def test_random_by_size_may_be_split_elsewhere() -> None:
    assert prove("proof_test.noise_by_size.default  a! b -> a! b; random").holds


def test_shards_that_draw_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def seeded(local: LocalCall, piece: FactorSlice) -> LocalCall:
        def draw(**arguments: torch.Tensor) -> torch.Tensor:
            return torch.rand(arguments["self"].shape, generator=torch.Generator().manual_seed(0))

        return replace(local, op=draw)

    monkeypatch.setitem(LOWERINGS, "seeded", seeded)
    (reason,) = reasons(prove("aten.rand_like.default  a! b -> a! b; random; lower b seeded"))[:1]
    assert reason == "factor b parallel: in 2 shards: two shards draw the same numbers"


# -- families ---------------------------------------------------------------------------------------------------------


def family(rule: Callable[[Call], str], *shapes: tuple[int, ...]) -> OpFamily:
    def samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
        return [Sample((Draw(shape),)) for shape in shapes]

    return OpFamily(rule, samples)


def test_kind_that_no_call_splits() -> None:
    rows = family(lambda call: "a! b -> a! b", (1, 5))
    assert reasons(prove("aten.exp.default rows", rows=rows)) == [
        "samples: no call of its samples can split a factor of kind whole"
    ]


def test_family_without_samples() -> None:
    rows = family(lambda call: "a b -> a b")
    assert reasons(prove("aten.exp.default rows", rows=rows)) == [
        "samples: nothing is proved: its samples have nothing to split"
    ]


def test_family_that_writes_nonsense() -> None:
    rows = family(lambda call: "a b c -> a", (4, 5))
    (reason,) = reasons(prove("aten.exp.default rows", rows=rows))
    assert reason.startswith("binding: the rule does not fit the call: 'a b c' has 3 dims, float64[4, 5] has 2")


def test_samples_that_cannot_be_made() -> None:
    def samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
        raise ValueError("no idea")

    rows = OpFamily(lambda call: "a -> a", samples)
    assert reasons(prove("aten.exp.default rows", rows=rows))[0] == "samples: no calls to prove it with: no idea"


def test_whole_is_a_claim_of_the_rule_not_of_one_call() -> None:
    """`roll` by nothing could be split; that does not make the rule too strict, for `roll` by one cannot."""

    def samples(op: torch._ops.OpOverload, tries: Tries) -> Iterable[Sample]:
        return [Sample((Draw((5,)), [shift], [0])) for shift in (0, 1)]

    rolled = OpFamily(lambda call: "a! -> a!", samples)
    assert prove("aten.roll.default rolled; linear 0", rolled=rolled).holds


def test_chance_does_not_refute() -> None:
    """Two numbers are sorted already half of the time."""
    sorted_pairs = family(lambda call: "a! -> a!, a!", (2,))
    assert prove("aten.sort.default sorted_pairs", sorted_pairs=sorted_pairs).holds


def test_random_state_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    prove("aten.exp.default  a -> a")
    assert torch.equal(before, torch.random.get_rng_state())
