"""The table as a whole: what it covers, and that every word in it means something."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from autopar.errors import RuleError
from autopar.rules.proof.samples import Tries
from autopar.rules.registry import rule_table
from autopar.rules.shard_call.dispatch import LOWERINGS, localiser
from autopar.rules.table import OpFamily, RuleTable, TableEntry, parse_table

OPS = Path(__file__).parents[3] / "shared" / "data" / "aten_ops_hf.csv"

# Gone before rules are bound: checks without effect, the items of a tuple, and a copy, traced as what it copies.
NOT_IN_GRAPHS = {"aten._assert_tensor_metadata.default", "<built-in function getitem>", "aten.copy.default"}


@pytest.mark.skipif(not OPS.exists(), reason="the list of ops of 90 architectures is not beside the checkout")
def test_every_op_of_the_hugging_face_architectures_has_a_line() -> None:
    import transformers.integrations.moe  # noqa: F401 - registers its own op

    with OPS.open() as file:
        ops = {row["op"] for row in csv.DictReader(file)}
    assert ops - NOT_IN_GRAPHS <= set(rule_table())


def test_lowerings_and_localisers_exist() -> None:
    for entry in rule_table().values():
        rule = entry.pattern or entry.clauses
        for _, lowering in rule.lowerings:
            assert lowering in LOWERINGS, entry.line
        for word in rule.localise:
            assert callable(localiser(word)), entry.line


def test_two_lines_for_one_op_are_an_error() -> None:
    entries = parse_table("aten.neg.default  ... -> ...\naten.neg.default  a -> a", {})
    with pytest.raises(RuleError) as caught:
        RuleTable(entries)
    assert (
        str(caught.value)
        == "two rules for aten.neg.default:\n  aten.neg.default  ... -> ...\n  aten.neg.default  a -> a"
    )


def test_an_unknown_family_is_an_error() -> None:
    with pytest.raises(RuleError) as caught:
        parse_table(
            "aten.neg.default  pointwize; linear 0", {"pointwise": OpFamily(lambda call: "", lambda op, tries: [])}
        )
    assert "'pointwize' is no family of rules, and the line has no '->'" in str(caught.value)
    assert "aten.neg.default  pointwize; linear 0" in str(caught.value)


def test_a_line_may_stand_for_several_ops() -> None:
    entries = parse_table("aten.{add,sub}.{Tensor,Scalar}  ... -> ...  # why", {})
    assert [entry.op for entry in entries] == [
        "aten.add.Tensor",
        "aten.add.Scalar",
        "aten.sub.Tensor",
        "aten.sub.Scalar",
    ]
    assert all(isinstance(entry, TableEntry) and entry.tries == Tries() for entry in entries)
