"""Words that neither the model nor the mesh has, and statements that are not executed yet: refused by name."""

from __future__ import annotations

import pytest

from autopar.errors import LayoutError
from autopar.sharding.layout.check import LayoutWords, check_layout
from autopar.sharding.layout.language import load_strategy, parse_layout

AXES = {"dp": 2, "tp": 4}
WORDS = LayoutWords(
    frozenset(("batch", "heads", "d_ff")),
    {
        "param": frozenset(("up.weight",)),
        "act": frozenset(("up/linear",)),
        "input": frozenset(("x",)),
        "output": frozenset(("/add",)),
        "buffer": frozenset(("mask",)),
    },
    {"up/linear": ("a", "n", "k")},
    ("blocks.0", "blocks.1"),
    frozenset(("gelu", "linear")),
)


ALL = "/add, mask, up.weight, up/linear, x"


def answer(text: str) -> str:
    with pytest.raises(LayoutError) as error:
        check_layout(parse_layout(text, "my.lay"), WORDS, AXES)
    assert str(error.value).startswith(error.value.code)
    return str(error.value)


@pytest.mark.parametrize(
    ("line", "column", "what", "fix"),
    [
        ("haeds -> tp", 0, "dim 'haeds'; did you mean 'heads'?", "batch, d_ff, heads"),
        ("seq* -> tp", 0, "dim 'seq*'", "batch, d_ff, heads"),
        ("(batch, head) -> tp", 8, "dim 'head'; did you mean 'heads'?", "batch, d_ff, heads"),
        ("act { d_f -> tp }", 6, "dim 'd_f'; did you mean 'd_ff'?", "batch, d_ff, heads"),
        ("act[bach] { d_ff -> tp }", 4, "dim 'bach'; did you mean 'batch'?", "batch, d_ff, heads"),
        ("@x[batc -> dp]", 3, "dim 'batc'; did you mean 'batch'?", "batch, d_ff, heads"),
        ("forbid all_gather(act[bat]) over tp", 22, "dim 'bat'; did you mean 'batch'?", "batch, d_ff, heads"),
        ("batch -> d", 9, "axis 'd'; did you mean 'dp'?", "dp, tp"),
        ("batch -> ?{dp, t}", 15, "axis 't'; did you mean 'tp'?", "dp, tp"),
        ("forbid all_gather(act) over ep", 28, "axis 'ep'", "dp, tp"),
        ("op @up/linear[n -> p]", 19, "axis 'p'; did you mean 'tp'?", "dp, tp"),
        (
            "@up.wieght[d_ff -> tp]",
            0,
            "tensor 'up.wieght'; did you mean 'up.weight'?",
            ALL,
        ),
        ("keep @up.wait", 0, "tensor 'up.wait'; did you mean 'up.weight'?", ALL),
        ("same @x @y", 0, "tensor 'y'", ALL),
        ("recompute full @up*", 0, "layer 'up*'", "blocks.0, blocks.1"),
        ("recompute full @block.1", 0, "layer 'block.1'; did you mean 'blocks.1'?", "blocks.0, blocks.1"),
        (
            "recompute keep(linaer) @blocks.*",
            15,
            "op of layers 'linaer'; did you mean 'linear'?",
            "gelu, linear",
        ),
        ("recompute only(gelu, @up/gelu) @blocks.*", 21, "op 'up/gelu'", "up/linear"),
        (
            "param@up/lin* { d_ff -> tp }",
            0,
            "tensor of the kind param 'up/lin*'",
            "up.weight",
        ),
        ("act@/add { batch -> dp }", 0, "tensor of the kind act '/add'", "up/linear"),
        ("op @up/lin[n -> tp]", 0, "op 'up/lin'; did you mean 'up/linear'?", "up/linear"),
        ("op @up*[m -> tp]", 8, "factor of up/linear 'm'", "a, k, n"),
    ],
)
def test_unknown_words(line: str, column: int, what: str, fix: str) -> None:
    assert answer(f"# first\n{line}") == (
        f"E1: there is no {what}\n  my.lay:2 | {line}\n           | {' ' * column}^\nfix: the names are {fix}"
    )


def test_words_that_are_known() -> None:
    text = (
        "mesh dp=2, tp=?\nlet both = dp*tp\nbatch -> both; d_* -> tp pad; * -> none\nheads -> tp?\n"
        "use@up.* { d_ff -> tp }; output { batch -> dp }; buffer { * -> none }; @mask[* -> none]\n"
        "op @up*[n -> tp]; keep @up.weight; same @up.weight @up.*\n"
        "forbid all_gather(grad[d_ff]@up*) over dp*tp; limit halo 25%; recompute full @blocks.*"
    )
    check_layout(parse_layout(text), WORDS, AXES)


def test_a_strategy_may_name_dims_that_the_model_lacks() -> None:
    check_layout(load_strategy("gshard_moe").on_axes({"ep": ("tp",)}), WORDS, AXES)
    with pytest.raises(LayoutError, match="E1: there is no axis 'ep'"):
        check_layout(load_strategy("gshard_moe"), WORDS, AXES)


@pytest.mark.parametrize("mesh", ["dp=2", "dp=2, tp=2", "tp=4, dp=2", "dp=2, tp=4, pp=1"])
def test_a_layout_for_another_mesh(mesh: str) -> None:
    assert answer(f"mesh {mesh}") == (
        "E1: the layout is for another mesh than the one it is to run on, dp=2, tp=4\n"
        f"  my.lay:1 | mesh {mesh}\n"
        "           | ^\n"
        "fix: write 'mesh dp=2, tp=4', or leave the line out"
    )


@pytest.mark.parametrize(
    ("line", "column", "message"),
    [
        ("buffer { batch -> dp }", 0, "buffers are stored whole on every rank"),
        ("@mas*[batch -> dp | none]", 0, "mask is a buffer, and buffers are stored whole on every rank"),
    ],
)
def test_what_is_not_executed_yet_is_refused(line: str, column: int, message: str) -> None:
    found = answer(line)
    assert found.startswith(f"E0: {message}")
    assert f"\n  my.lay:1 | {line}\n           | {' ' * column}^\nfix: " in found
