"""Plans at other sizes: statements that no longer hold are named, and the first rank warns of them once."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest

import autopar
from examples.gpt import gpt
from examples.llama3_8b import llama3_8b
from tests.runtime.launcher import launch

MODEL = {"layers": 1, "d_model": 24, "heads": 4, "vocab": 32, "seq": 8}
HIDDEN = {"blocks.*.up.weight": "hidden d_model"}


def plan_text(layout: str, dims: dict[str, str] | None = None, lines: str = "") -> str:
    """The text of a plan for a batch of 8, with further lines."""
    model, inputs = gpt(batch=8, **MODEL)
    plan = autopar.plan(model, "tp=2", inputs, cluster="h100", layout=layout, dims=dims, cache=False)
    text = plan.text + lines
    count = sum(bool(line) and not line.startswith("#") for line in text.splitlines())
    return re.sub(r"(#   statements +)\d+", rf"\g<1>{count}", text)


def lost(text: str, batch: int, dims: dict[str, str] | None = None) -> tuple[str, ...]:
    model, inputs = gpt(batch=batch, **MODEL)
    return autopar.Plan.read(text, autopar.trace(model, inputs, dims=dims)).left_whole


@pytest.mark.parametrize("batch", [8, 3])
def test_a_dim_of_another_name(batch: int) -> None:
    text = plan_text("hidden -> tp; * -> none", HIDDEN)
    assert lost(text, batch, HIDDEN) == ()
    (said,) = lost(text, batch)
    assert said.startswith("the plan splits hidden over tp, and no dim of this call has this name; fix: give the dims=")


@pytest.mark.parametrize(
    ("line", "dropped"),
    [
        ("op @blocks.0.up/linear[nope -> tp]", "choices of ops do not hold at these sizes and are dropped: E1"),
        (
            "@blocks.0.up/linear[batch -> tp, d_ff -> tp]",
            "statements about single tensors and ops do not hold at these sizes and are dropped: E3",
        ),
    ],
)
def test_statements_that_are_dropped(line: str, dropped: str) -> None:
    text = plan_text("d_ff -> tp; * -> none", lines=f"\n{line}\n")
    (said,) = lost(text, 3)
    assert said.startswith(f"the plan's {dropped}")
    # At its own sizes the plan is read as it is.
    with pytest.raises(autopar.LayoutError, match=dropped[-2:]):
        lost(text, 8)


@pytest.mark.parametrize(("length", "whole"), [(16, False), (32, False), (15, True)])
def test_a_length_that_is_left_whole(length: int, whole: bool) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}

    def llama(seq: int) -> tuple[Any, Any]:
        return llama3_8b(1, 4, seq, device="meta", loss=True, num_key_value_heads=2, **sizes)

    model, inputs = llama(16)
    plan = autopar.plan(model, "tp=2", inputs, cluster="h100", layout="megatron_sp", cache=False)
    assert "seq -> tp | none" in plan.text
    read = autopar.Plan.read(plan.text, autopar.trace(*llama(length)))
    assert [said[:31] for said in read.left_whole] == ["the plan leaves seq (15) whole,"] * whole
    assert ("the plan leaves seq" in read.summary()) == whole


def warned(path: str) -> list[list[str]]:
    """Warnings of modules of a plan's file: of one that is called at one size, and of one at two."""
    found = []
    for batches in ((8,), (6, 4)):
        made = [gpt(batch=batch, **MODEL) for batch in batches]
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("always")
            module = autopar.parallelize(made[0][0], "tp=2", made[0][1], layout=path, dims=HIDDEN)
            for _, inputs in made:
                module(**inputs)
        found.append([str(one.message) for one in shown if issubclass(one.category, autopar.AutoparWarning)])
    return found


def test_the_first_rank_warns_once(tmp_path: Path) -> None:
    path = tmp_path / "gpt.plan.lay"
    text = plan_text("hidden -> tp; * -> none", HIDDEN, "\nop @blocks.0.down/linear[nope -> tp]\n")
    # The plan of another graph, also for calls with a batch of 8.
    path.write_text(re.sub(r"(#   graph +)\w+", r"\g<1>0000000000000000", text))
    first, other = launch(warned, str(path), ranks=2)
    assert [len(said) for said in first] == [1, 1]
    assert first[0][0].startswith("the plan's choices of ops do not hold")
    assert other == [[], []]
