"""State dicts and checkpoints: saved under one layout, loaded under another, the curve goes on."""

from __future__ import annotations

import copy
import io
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import autopar
from autopar.runtime.module import ParallelModule
from examples.gpt import gpt
from tests.gaps import number
from tests.runtime.launcher import in_turn, launch
from tests.runtime.training import Inputs, adamw, batches, error_of, gap, losses, whole

BEFORE, AFTER = 4, 3
HEADS = "heads -> dp*tp; * -> none"
PARTS = """
batch -> dp; heads -> tp; * -> none
param, grad, opt { head_dim -> dp; heads -> tp; * -> none }
"""
"""Layouts under which two axes cut one dim of the fused q, k, v weight, in blocks: by one of its parts, and by two."""
STAGES = "micro 2; pipeline pp 1f1b; zero1"


def model_and_inputs() -> tuple[nn.Module, Inputs]:
    torch.manual_seed(0)
    model, inputs = gpt(batch=4, seq=8, vocab=40, d_model=16, layers=1)
    return model.double(), inputs


def other_weights(model: nn.Module) -> nn.Module:
    """A copy whose values say nothing about the model's."""
    fresh = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.normal_()
    return fresh


def curve_gap(found: list[float], expected: list[float]) -> float:
    return max(number(abs(a - b) / abs(b)) for a, b in zip(found, expected, strict=True))


def same_folder() -> str:
    """A folder of the first rank's."""
    place = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(place, src=0)
    return place[0]


SAVED = {
    "ddp": ("ddp", "dp=4"),
    "megatron": ("megatron", "dp=2,tp=2"),
    "fsdp_tp": ("fsdp_tp", "fsdp=2,tp=2"),
    "parts": (PARTS, "dp=2,tp=2"),
    "stages": (STAGES, "pp=2,dp=2"),
    "fsdp": ("fsdp", "fsdp=2"),
}
LOADED = {
    "fsdp to zero1": ("zero1", "dp=2"),
    "ddp to megatron": ("megatron", "dp=2,tp=2"),
    "ddp to fsdp_tp": ("fsdp_tp", "fsdp=2,tp=2"),
    "megatron to fsdp": ("fsdp", "fsdp=4"),
    "fsdp_tp to megatron4": ("megatron", "tp=4"),
    "fsdp_tp to zero1": ("zero1", "dp=4"),
    "parts to heads": (HEADS, "dp=2,tp=2"),
    "stages to megatron": ("megatron", "dp=2,tp=2"),
    "megatron to stages": (STAGES, "pp=2,dp=2"),
    "stages to other stages": ("micro 2; pipeline pp interleaved(2); fsdp_tp(fsdp=none)", "tp=2,pp=2"),
}
# On two ranks; all others take four.
FAST_LOADED = ("fsdp to zero1",)


def load_under_other_layouts(cases: tuple[str, ...]) -> dict[str, float]:
    """Saved under one layout at a step, loaded under another; the later losses beside those of one process."""
    model, inputs = model_and_inputs()
    data = batches(inputs, BEFORE + AFTER)
    alone = copy.deepcopy(model)
    expected = losses(alone, data, adamw(alone))[BEFORE:]
    sources = dict.fromkeys(case.split()[0] for case in cases)
    saved = {source: save(model, inputs, data[:BEFORE], *SAVED[source]) for source in sources}
    found: dict[str, float] = {}
    for case in cases:
        source, (layout, mesh) = case.split()[0], LOADED[case]
        for way in ("get and set", "plain"):
            parallel = autopar.parallelize(other_weights(model), mesh, inputs, layout=layout)
            optimizer = adamw(parallel)
            load(parallel, optimizer, saved[source], way)
            found[f"{case}, {way}"] = curve_gap(losses(parallel, data[BEFORE:], optimizer), expected)
    return found


def save(model: nn.Module, inputs: Inputs, data: list[Inputs], layout: str, mesh: str) -> str:
    parallel = autopar.parallelize(copy.deepcopy(model), mesh, inputs, layout=layout)
    optimizer = adamw(parallel)
    losses(parallel, data, optimizer)
    folder = same_folder()
    state = {"model": get_model_state_dict(parallel), "optimizer": get_optimizer_state_dict(parallel, optimizer)}
    in_background = autopar.Checkpoints(f"{folder}/get and set")
    in_background.save(state, BEFORE)
    in_background.finish()
    dcp.save({"model": parallel.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=f"{folder}/plain")
    return folder


def load(parallel: ParallelModule, optimizer: torch.optim.Optimizer, folder: str, way: str) -> None:
    place = f"{folder}/{way}"
    if way == "get and set":
        state = {"model": get_model_state_dict(parallel), "optimizer": get_optimizer_state_dict(parallel, optimizer)}
        assert autopar.Checkpoints(place).load(state) == BEFORE
        set_model_state_dict(parallel, state["model"])
        set_optimizer_state_dict(parallel, optimizer, state["optimizer"])
        return
    get_optimizer_state_dict(parallel, optimizer)  # makes the state that is to be loaded into
    state = {"model": parallel.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=place)
    parallel.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


EXCHANGED = (
    ("megatron", "dp=2,tp=2"),
    ("fsdp_tp", "fsdp=2,tp=2"),
    ("fsdp", "fsdp=4"),
    (HEADS, "dp=2,tp=2"),
    (PARTS, "dp=2,tp=2"),
    (STAGES, "pp=2,dp=2"),
)
FAST_EXCHANGED = (("fsdp", "fsdp=2"),)


def exchange_with_the_model(layouts: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    """Whole state dicts, from the original model and back to it, under layouts of every kind."""
    model, inputs = model_and_inputs()
    data = batches(inputs, BEFORE + AFTER)
    alone = copy.deepcopy(model)
    optimizer_alone = adamw(alone)
    losses(alone, data[:BEFORE], optimizer_alone)
    full, full_optimizer = get_model_state_dict(alone), get_optimizer_state_dict(alone, optimizer_alone)
    full, full_optimizer = copy.deepcopy(full), copy.deepcopy(full_optimizer)
    expected = losses(alone, data[BEFORE:], optimizer_alone)
    whole_options = StateDictOptions(full_state_dict=True)
    found: dict[str, Any] = {}
    for layout, mesh in layouts:
        for way in ("every rank", "the first rank"):
            parallel = autopar.parallelize(other_weights(model), mesh, inputs, layout=layout)
            optimizer = adamw(parallel)
            given = copy.deepcopy((full, full_optimizer))
            options = whole_options
            if way == "the first rank":
                options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
                given = given if dist.get_rank() == 0 else ({}, {})
            set_model_state_dict(parallel, given[0], options=options)
            set_optimizer_state_dict(parallel, optimizer, given[1], options=options)
            back = get_model_state_dict(parallel, options=whole_options)
            found[f"{layout} {way}: names"] = list(back) == list(full)
            found[f"{layout} {way}: values"] = max(gap(back[name], value) for name, value in full.items())
            moments = get_optimizer_state_dict(parallel, optimizer, options=whole_options)
            pairs = [(moments["state"][name], value) for name, value in full_optimizer["state"].items()]
            found[f"{layout} {way}: moments"] = max(gap(a["exp_avg_sq"], b["exp_avg_sq"]) for a, b in pairs)
            found[f"{layout} {way}: curve"] = curve_gap(losses(parallel, data[BEFORE:], optimizer), expected)
        twin = copy.deepcopy(model)
        twin.load_state_dict({name: whole(value) for name, value in parallel.state_dict().items()})
        found[f"{layout}: twin"] = gap(parallel(**inputs), twin(**inputs))
        parallel.load_full_state_dict(full)
        found[f"{layout}: load_full"] = max(gap(parallel.state_dict()[name], value) for name, value in full.items())
    return found


def keep_and_load() -> dict[str, Any]:
    """`torch.save` of the state of a rank, strict and assigning loads, and what does not fit."""
    model, inputs = model_and_inputs()
    parallel = autopar.parallelize(copy.deepcopy(model), "tp=2", inputs, layout="megatron")
    other = autopar.parallelize(other_weights(model), "tp=2", inputs, layout="megatron")
    file = io.BytesIO()
    torch.save(parallel.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    found: dict[str, Any] = {"names": list(state) == list(model.state_dict())}
    optimizer = adamw(other)
    other.load_state_dict(state)
    found["loaded"] = gap(other(**inputs), model(**inputs))
    found["tied"] = other.get_parameter("head.weight") is other.get_parameter("tokens.weight")
    found["same parameters"] = all(
        a is b for a, b in zip(optimizer.param_groups[0]["params"], other.parameters(), strict=True)
    )
    assigned = autopar.parallelize(other_weights(model), "tp=2", inputs, layout="megatron")
    assigned.load_state_dict(state, assign=True)
    loss = assigned(**inputs)
    found["assigned"] = gap(loss, model(**inputs))
    loss.backward()
    found["assigned learns"] = all(parameter.grad is not None for parameter in assigned.parameters())
    found["assigned is tied"] = assigned.get_parameter("head.weight") is assigned.get_parameter("tokens.weight")

    lacking = {name: value for name, value in state.items() if name != "norm.bias"}
    found["lacking"] = error_of(lambda: other.load_state_dict(lacking), RuntimeError)
    found["not strict"] = other.load_state_dict(lacking, strict=False).missing_keys
    found["extra"] = error_of(lambda: other.load_state_dict({**state, "extra": torch.ones(2)}), RuntimeError)
    found["shape"] = error_of(lambda: other.load_state_dict({**state, "norm.bias": torch.ones(3)}), RuntimeError)

    plain = autopar.parallelize(other_weights(model), "tp=2", inputs, layout="megatron")
    plain.load_state_dict(model.state_dict())
    found["of the model"] = gap(plain(**inputs), model(**inputs))
    elsewhere = autopar.parallelize(other_weights(model), "fsdp=2", inputs, layout="fsdp")
    elsewhere.load_state_dict(state)
    found["of another layout"] = gap(elsewhere(**inputs), model(**inputs))
    return found


@pytest.fixture(scope="module")
def on_two() -> list[dict[str, Any]]:
    given = (load_under_other_layouts, (FAST_LOADED,)), (exchange_with_the_model, (FAST_EXCHANGED,))
    return launch(in_turn, *given, (keep_and_load, ()), ranks=2)


@pytest.fixture(scope="module")
def all_on_four() -> list[dict[str, Any]]:
    loaded = tuple(case for case in LOADED if case not in FAST_LOADED)
    return launch(in_turn, (load_under_other_layouts, (loaded,)), (exchange_with_the_model, (EXCHANGED,)), ranks=4)


def check_curves(everyone: list[dict[str, Any]], cases: int) -> None:
    for found in everyone:
        curves = found["load_under_other_layouts"]
        assert len(curves) == cases
        assert {case: worst for case, worst in curves.items() if not worst < 1e-9} == {}


def check_exchanges(everyone: list[dict[str, Any]], layouts: int) -> None:
    for found in everyone:
        cases = found["exchange_with_the_model"]
        assert len(cases) == layouts * (2 * 4 + 2)
        assert all(value is True for case, value in cases.items() if case.endswith("names"))
        gaps = {case: value for case, value in cases.items() if not case.endswith("names")}
        assert {case: worst for case, worst in gaps.items() if not worst < 1e-9} == {}


def test_a_checkpoint_under_one_layout_continues_under_another(on_two: list[dict[str, Any]]) -> None:
    check_curves(on_two, 2 * len(FAST_LOADED))


@pytest.mark.slow
def test_checkpoints_continue_under_more_layouts(all_on_four: list[dict[str, Any]]) -> None:
    check_curves(all_on_four, 2 * (len(LOADED) - len(FAST_LOADED)))


def test_whole_state_dicts_are_those_of_the_model(on_two: list[dict[str, Any]]) -> None:
    check_exchanges(on_two, len(FAST_EXCHANGED))


@pytest.mark.slow
def test_whole_state_dicts_under_more_layouts(all_on_four: list[dict[str, Any]]) -> None:
    check_exchanges(all_on_four, len(EXCHANGED))


def test_state_is_kept_and_loaded(on_two: list[dict[str, Any]]) -> None:
    for found in on_two:
        case = found["keep_and_load"]
        assert {name: case[name] for name in ("names", "tied", "same parameters")} == {
            "names": True,
            "tied": True,
            "same parameters": True,
        }
        assert case["loaded"] < 1e-12
        assert case["assigned"] < 1e-12
        assert case["assigned learns"]
        assert case["assigned is tied"]


def test_state_of_another_layout_or_of_the_model_is_split_when_it_is_loaded(on_two: list[dict[str, Any]]) -> None:
    for found in on_two:
        case = found["keep_and_load"]
        assert case["of the model"] < 1e-12
        assert case["of another layout"] < 1e-12


def test_state_that_does_not_fit_is_refused_as_torch_does_it(on_two: list[dict[str, Any]]) -> None:
    for found in on_two:
        case = found["keep_and_load"]
        assert 'Missing key(s) in state_dict: "norm.bias"' in case["lacking"]
        assert case["not strict"] == ["norm.bias"]
        assert 'Unexpected key(s) in state_dict: "extra"' in case["extra"]
        assert "size mismatch for norm.bias" in case["shape"]
