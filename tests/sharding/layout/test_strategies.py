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


def test_names() -> None:
    shipped = {"ddp", "fsdp", "fsdp_tp", "gshard_moe", "megatron", "megatron_sp", "spatial", "zero1"}
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
        "batch -> dp\n"
        "(heads, kv_heads, d_ff) -> tp\n"
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
