"""Dims that a layout leaves whole are named, with the axis that does not divide them."""

from __future__ import annotations

import pytest

import autopar
from autopar.mesh import Mesh
from autopar.sharding.layout.language import choose_layout
from autopar.sharding.layout.left_whole import left_whole
from examples.gpt import gpt


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
