"""Dims that a layout leaves whole are named, with the axis that does not divide them."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

import autopar
from autopar.cli import main
from autopar.mesh import Mesh
from autopar.sharding.layout.language import choose_layout
from autopar.sharding.layout.left_whole import left_whole
from examples.gpt import gpt
from tests.runtime.launcher import launch


@pytest.mark.parametrize(
    ("heads", "mesh", "layout", "found"),
    [
        (6, "tp=4", "megatron", {"heads (6)": "fix: tp = 2"}),
        (3, "tp=2", "megatron", {"heads (3)": "fix: another size of tp"}),
        (4, "tp=4", "megatron", {}),
        (3, "dp=2", "megatron", {}),
        (3, "dp=2", "fsdp(fsdp=dp)", {}),
        # A rule of its own for heads says that they are whole.
        (3, "tp=2", "heads -> none; d_ff -> tp | none; * -> none", {}),
        (4, "tp=2,dp=5", "heads -> tp | none; d_ff -> dp | none; * -> none", {"d_ff (96)": "another size of dp"}),
    ],
)
def test_what_is_left_whole(heads: int, mesh: str, layout: str, found: dict[str, str]) -> None:
    graph = autopar.trace(*gpt(layers=1, d_model=24, heads=heads, vocab=32, batch=4, seq=8))
    axes = Mesh(mesh).whole
    said = list(left_whole(graph, choose_layout(layout, axes), axes))
    assert len(said) == len(found)
    for text, (dim, fix) in zip(said, found.items(), strict=True):
        assert f" leaves {dim} whole" in text
        assert text.endswith(fix)


def test_the_summary_names_them() -> None:
    model, inputs = gpt(layers=1, d_model=24, heads=6, vocab=32, batch=4, seq=8)
    plan = autopar.plan(model, "tp=4", inputs, cluster="h100", layout="megatron")
    assert "strategy megatron leaves heads (6) whole" in plan.summary()
    # The attention of each rank has all heads: its weights are whole.
    assert not plan.layout_of("blocks.0.attention.qkv.weight").axes


def warned() -> list[list[str]]:
    """Warnings of `parallelize` and of a call of another size, with heads that do not divide and that do."""
    found = []
    for heads in (3, 4):
        model, inputs = gpt(layers=1, d_model=24, heads=heads, vocab=32, batch=4, seq=8)
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("always")
            module = autopar.parallelize(model, "tp=2", inputs, layout="megatron")
            module(**gpt(layers=1, d_model=24, heads=heads, vocab=32, batch=4, seq=6)[1])
        found.append([str(one.message) for one in shown if issubclass(one.category, autopar.AutoparWarning)])
    return found


def test_the_first_rank_warns_once() -> None:
    first, other = launch(warned, ranks=2)
    ((said,), none) = first
    assert said.startswith("strategy megatron leaves heads (3) whole, so each rank of tp computes all of it")
    assert [none, *other] == [[], [], []]


@pytest.mark.filterwarnings("always::autopar.AutoparWarning")
@pytest.mark.parametrize(
    "command", ["check {} --mesh tp=2 --layout megatron", "compare ddp megatron --target {} --mesh tp=2,dp=1"]
)
def test_commands_warn(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    target = f"{Path(__file__).parents[3]}/examples/gpt.py:gpt"
    sizes = ["--set", "layers=1", "--set", "d_model=24", "--set", "vocab=32", "--set", "batch=4", "--set", "seq=8"]
    for heads, count in (("3", 1), ("4", 0)):
        assert main([*command.format(target).split(), *sizes, "--set", f"heads={heads}"]) == 0
        assert capsys.readouterr().err.count("warning: strategy megatron leaves heads (3) whole") == count
