"""The strategies that autopar ships are layouts that say who they are."""

from __future__ import annotations

import pytest

from autopar.errors import LayoutError
from autopar.files import data_folder
from autopar.sharding.layout.language import (
    axes_of,
    choose_layout,
    load_strategy,
    parse_layout,
    print_layout,
    strategy_names,
    strategy_path,
)
from autopar.sharding.layout.syntax import PipelineStatement, print_statement


def test_names() -> None:
    shipped = {"ddp", "fsdp", "fsdp_tp", "gshard_moe", "megatron", "megatron_sp", "spatial", "zero1"}
    shipped |= {"megatron_3d", "pipeline"}
    shipped |= {"diloco", "gossip", "local_sgd", "parameter_server"}
    assert shipped <= set(strategy_names())
    assert strategy_names() == tuple(sorted(path.stem for path in data_folder("strategies").glob("*.lay")))


@pytest.mark.parametrize("name", strategy_names())
def test_strategy(name: str) -> None:
    layout = load_strategy(name)
    assert parse_layout(print_layout(layout)) == layout
    assert layout.strategy is not None
    assert layout.strategy.name == name
    assert layout.strategy.description
    assert layout.mesh is None, "a strategy is for any mesh"
    assert strategy_path(name).read_text(encoding="utf-8").startswith("# "), "it says first where it comes from"


def test_what_megatron_says() -> None:
    assert print_layout(load_strategy("megatron")) == (
        'strategy megatron "tensor parallel: heads, d_ff and vocab"\n'
        "batch -> dp pad\n"
        "(heads, kv_heads, d_ff) -> tp | none\n"
        "vocab -> tp pad | none !1\n"
        "* -> none\n"
    )


@pytest.mark.parametrize(
    ("name", "hint"), [("megatrn", "; did you mean 'megatron'?"), ("../fsdp", "; did you mean 'fsdp'?"), ("zzz", "")]
)
def test_unknown_name(name: str, hint: str) -> None:
    with pytest.raises(LayoutError) as error:
        load_strategy(name)
    assert error.value.code == "E1"
    assert str(error.value) == (
        f"E1: there is no strategy '{name}'{hint}\nfix: the names are {', '.join(strategy_names())}"
    )


def test_a_strategy_of_one_axis_is_on_the_only_axis_of_a_mesh() -> None:
    for axes in ({"data": 4}, {"one": 1, "data": 4}):
        assert set(axes_of(choose_layout("fsdp", axes))) == {"data"}
        assert set(axes_of(choose_layout("ddp", axes))) == {"data"}
    assert axes_of(choose_layout("fsdp", {"data": 1})) == ()
    assert set(axes_of(choose_layout("megatron", {"tp": 4}))) == {"tp"}
    for strategy, axes in (("fsdp", {"a": 2, "b": 2}), ("megatron", {"data": 4})):
        with pytest.raises(LayoutError, match="splits nothing on a mesh of"):
            choose_layout(strategy, axes)


# -- strategies with stages --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "axes", "stages", "rest"),
    [
        ("pipeline", {"pp": 4}, "pipeline pp 1f1b", set()),
        ("pipeline", {"pp": 1, "dp": 4}, "pipeline pp 1f1b", {"dp"}),
        ("pipeline", {"dp": 4}, None, {"dp"}),
        ("pipeline(pp=none)", {"pp": 2, "dp": 2}, None, {"dp"}),
        ("pipeline(pp=a, dp=b*c)", {"a": 2, "b": 2, "c": 2}, "pipeline a 1f1b", {"b", "c"}),
        ("megatron_3d", {"pp": 2, "tp": 2}, "pipeline pp 1f1b", {"tp"}),
        ("megatron_3d", {"dp": 2, "tp": 2}, None, {"dp", "tp"}),
        # Statements of the text come first: their pipeline is the one that counts.
        ("pipeline pp gpipe; megatron_3d", {"pp": 2, "tp": 2}, "pipeline pp gpipe", {"tp"}),
        ("pipeline stages gpipe; pipeline", {"stages": 2, "dp": 2}, "pipeline stages gpipe", {"dp"}),
        ("micro 8; pipeline", {"pp": 2, "dp": 2}, "pipeline pp 1f1b", {"dp"}),
        ("micro 8\npipeline\n", {"pp": 2, "dp": 2}, "pipeline pp 1f1b", {"dp"}),
        ("micro 8; pipeline(pp=x, dp=none)", {"x": 2}, "pipeline x 1f1b", set()),
        ("micro 8; pipeline pp ?", {"pp": 2, "dp": 2}, "pipeline pp ?", set()),
        ("pipeline pp interleaved(2)", {"pp": 2, "dp": 2}, "pipeline pp interleaved(2)", set()),
    ],
)
def test_stages_of_a_strategy(text: str, axes: dict[str, int], stages: str | None, rest: set[str]) -> None:
    layout = choose_layout(text, axes)
    found = [print_statement(one) for one in layout if isinstance(one, PipelineStatement)]
    assert found == ([] if stages is None else [stages])
    assert set(axes_of(layout)) == rest | (set() if stages is None else {stages.split()[1]})
    assert choose_layout(layout, axes) == layout
    assert (layout.micro_batches is not None) == text.startswith("micro")


@pytest.mark.parametrize(
    "lines",
    [
        "recompute full @blocks.*",
        "recompute keep(product every 2, attention) @blocks.*",
        "regather @*",
        "keep @head.weight",
        "micro 2; recompute offload @blocks.1; regather @*",
    ],
)
def test_holds_stand_before_a_strategy(lines: str) -> None:
    layout = choose_layout(f"{lines}; fsdp(fsdp=a)", {"a": 2, "b": 2})
    strategy = choose_layout("fsdp(fsdp=a)", {"a": 2, "b": 2})
    assert layout.statements == (*parse_layout(lines).statements, *strategy.statements)
    assert choose_layout(f"{lines}\nfsdp\n", {"fsdp": 2}).statements[-1] == load_strategy("fsdp").statements[-1]


def test_stages_lie_along_one_axis() -> None:
    with pytest.raises(LayoutError, match=r"'pp' stands for a\*b\n.*\n.*\nfix: name one axis"):
        choose_layout("pipeline(pp=a*b)", {"a": 2, "b": 2})
    with pytest.raises(LayoutError, match=r"'both' stands for a\*b\n.*\n.*\nfix: name one axis"):
        parse_layout("let both = a*b; pipeline both 1f1b")
    renamed = parse_layout("let one = a; pipeline one 1f1b; cut one before @x")
    assert [print_statement(one) for one in renamed][1:] == ["pipeline a 1f1b", "cut a before @x"]
    with pytest.raises(LayoutError, match="splits nothing on a mesh of x"):
        choose_layout("pipeline", {"x": 4})


# -- strategies with replicas that drift -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "axes", "drift", "rest"),
    [
        ("local_sgd", {"pod": 4, "dp": 2}, "drift pod -> mean every 16", {"dp"}),
        ("diloco", {"pod": 4}, "drift pod -> mean every 500, outer nesterov(0.7, 0.9)", set()),
        ("gossip(pod=a*b, dp=c)", {"a": 2, "b": 2, "c": 2}, "drift a*b -> exponential", {"c"}),
        ("parameter_server", {"pod": 4}, "drift pod -> server(1), stale 4", set()),
        ("local_sgd", {"dp": 4}, None, {"dp"}),
        ("drift pod -> ring; diloco", {"pod": 2, "dp": 2}, "drift pod -> ring", {"dp"}),
        ("drift pod -> mean every 8; micro 2; fsdp", {"pod": 2, "dp": 2}, "drift pod -> mean every 8", {"dp"}),
        ("drift x -> ring\nmegatron(tp=y, dp=none)", {"x": 2, "y": 2}, "drift x -> ring", {"y"}),
    ],
)
def test_replicas_of_a_strategy(text: str, axes: dict[str, int], drift: str | None, rest: set[str]) -> None:
    layout = choose_layout(text, axes)
    assert (None if layout.drift is None else print_statement(layout.drift)) == drift
    drifting = set() if layout.drift is None else set(layout.drift.axes)
    assert set(axes_of(layout)) == drifting | rest
    assert choose_layout(layout, axes) == layout
