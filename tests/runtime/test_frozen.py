"""Frozen weights beside trained adapters, on real processes: exact, no gradients and states, adapters saved alone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

import autopar
from examples.gpt import gpt
from examples.lora_llama import lora_llama, with_adapters
from tests.runtime.launcher import launch
from tests.runtime.training import Inputs, error_of, gap, gradient_gap

FSDP = "batch -> fsdp; * -> none; param, grad, opt { * -> fsdp | none }"
REGATHERED = f"{FSDP}; regather @*; recompute full @*.0; recompute selective @*.1"
QUICK = (("ddp", "dp=2"), (REGATHERED, "fsdp=2"), ("megatron", "tp=2"))
STAGES = "micro 2; pipeline pp {}; * -> none"
SLOW = (
    ("fsdp", "fsdp=2"),
    ("zero1", "dp=2"),
    ("megatron_sp", "tp=2"),
    ("micro 2; fsdp", "fsdp=2"),
    (f"micro 2; {REGATHERED}", "fsdp=2"),
    (STAGES.format("1f1b"), "pp=2"),
    (STAGES.format("zero_bubble"), "pp=2"),
    (f"{STAGES.format('gpipe')}; recompute full @*.0; recompute full @*.1", "pp=2"),
)
TRAINED_ALONE = StateDictOptions(ignore_frozen_params=True)
WHOLE = StateDictOptions(ignore_frozen_params=True, full_state_dict=True)


def drawn(model: nn.Module) -> nn.Module:
    """Adapters are zero at first, and then half of their gradients are."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    return model


def adapted(kind: str) -> tuple[nn.Module, Inputs]:
    torch.manual_seed(0)
    if kind == "gpt":  # its embedding is also its last linear
        model, inputs = gpt(layers=2, d_model=16, heads=2, vocab=24, seq=6, batch=4)
        return drawn(with_adapters(model, 2, ("qkv", "out", "up", "down"))).double(), inputs
    model, inputs = lora_llama(seq=8, rank=4, peft=kind == "peft")
    return drawn(model).double(), inputs


def loss_of(result: Any) -> Any:
    return result if isinstance(result, torch.Tensor) else result.loss


def compared(kind: str, cases: tuple[tuple[str, str], ...]) -> dict[str, float]:
    """The largest difference of the gradients under each layout; frozen parameters must have none."""
    model, inputs = adapted(kind)
    loss_of(model(**inputs)).backward()
    found = {}
    for layout, mesh in cases:
        parallel = autopar.parallelize(copy.deepcopy(model), mesh, inputs, layout=layout)
        parallel.zero_grad()
        loss = loss_of(parallel(**inputs))
        loss.backward()
        found[layout] = max(gradient_gap(model, parallel), gap(loss, loss_of(model(**inputs))))
        reduced = {one.tensor for one in parallel.collectives() if one.direction == "backward"}
        frozen = {name for name, one in model.named_parameters() if not one.requires_grad}
        assert reduced.isdisjoint(frozen), layout
    return found


def test_adapters_learn_as_on_one_process() -> None:
    for found in launch(compared, "gpt", QUICK, ranks=2):
        assert max(found.values()) < 1e-12, found


@pytest.mark.slow
def test_adapters_learn_under_every_strategy() -> None:
    for found in launch(compared, "gpt", SLOW, ranks=2):
        assert max(found.values()) < 1e-12, found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "peft"])
def test_adapters_of_a_llama(kind: str) -> None:
    pytest.importorskip("transformers")
    if kind == "peft":
        pytest.importorskip("peft")
    for found in launch(compared, kind, (*QUICK[:2], SLOW[6]), ranks=2):
        # Its norms are computed in float32, whatever the dtype of the model.
        assert max(found.values()) < 2e-6, found


def in_half_precision() -> dict[str, Any]:
    """Dtypes of stored parameters, the difference from trained masters, and errors of parameters that are thawed."""
    model, inputs = adapted("gpt")
    model.float()
    found: dict[str, Any] = {}
    parallel = autopar.parallelize(copy.deepcopy(model), "fsdp=2", inputs, layout="fsdp", precision="bf16")
    found["dtypes"] = {(one.requires_grad, one.dtype) for one in parallel.parameters()}
    thawed = copy.deepcopy(model).requires_grad_(True)
    masters = autopar.parallelize(thawed, "fsdp=2", inputs, layout="fsdp", precision="bf16")
    found["loss"] = gap(parallel(**inputs), masters(**inputs))
    loss_of(parallel(**inputs)).backward()
    loss_of(masters(**inputs)).backward()
    found["gradient"] = max(
        gap(parallel.get_parameter(name).grad, masters.get_parameter(name).grad)
        for name, one in parallel.named_parameters()
        if one.requires_grad
    )
    masters.get_parameter("norm.weight").requires_grad_(False)  # a new graph, the same weight
    masters.zero_grad()
    masters(**inputs).backward()
    found["frozen"] = masters.get_parameter("norm.weight").grad is None
    parallel.get_parameter("norm.weight").requires_grad_(True)
    found["thawed"] = error_of(lambda: parallel(**inputs))
    parallel.get_parameter("norm.weight").requires_grad_(False)
    found["again"] = gap(parallel(**inputs), masters(**inputs))
    return found


@pytest.mark.slow
def test_frozen_weights_are_stored_in_the_dtype_of_the_compute() -> None:
    for found in launch(in_half_precision, ranks=2):
        assert found["dtypes"] == {(True, torch.float32), (False, torch.bfloat16)}
        assert found["loss"] == found["gradient"] == found["again"] == 0
        assert found["frozen"]
        assert found["thawed"].splitlines() == [
            "norm.weight was frozen when its module was made parallel, and is to be trained now: expected a weight in "
            "torch.float32, got one in torch.bfloat16, the dtype of the compute",
            "fix: norm.weight.requires_grad_() of the model before parallelize; a parameter may be frozen later",
        ]


def saved_alone(folder: str) -> dict[str, Any]:
    """Adapters of one layout in others: by a checkpoint of shards, and as whole tensors."""
    model, inputs = adapted("gpt")
    other = drawn(copy.deepcopy(model))
    trained = {name for name, one in model.named_parameters() if one.requires_grad}
    found: dict[str, Any] = {}
    first = autopar.parallelize(copy.deepcopy(model), "fsdp=2", inputs, layout="fsdp")
    shards = get_model_state_dict(first, options=TRAINED_ALONE)
    # torch leaves the second name of a tied weight.
    found["names"] = set(shards) - {"head.weight"} == trained
    dcp.save(shards, checkpoint_id=folder)
    whole = get_model_state_dict(first, options=WHOLE)
    found["whole"] = max((gap(whole[name], model.get_parameter(name)) for name in whole), default=1.0)
    expected = model(**inputs)
    for layout, mesh in (("megatron", "tp=2"), (STAGES.format("1f1b"), "pp=2")):
        for way in ("shards", "whole"):
            second = autopar.parallelize(copy.deepcopy(other), mesh, inputs, layout=layout)
            before = gap(second(**inputs), expected)
            state = get_model_state_dict(second, options=TRAINED_ALONE) if way == "shards" else dict(whole)
            if way == "shards":
                dcp.load(state, checkpoint_id=folder)
            options = StateDictOptions(strict=False, full_state_dict=way == "whole")
            set_model_state_dict(second, state, options=options)
            found[f"{layout} {way}"] = gap(second(**inputs), expected)
            assert before > 1e-4, "else nothing was loaded"
    return found


@pytest.mark.slow
def test_adapters_are_saved_and_loaded_alone(tmp_path: Path) -> None:
    for found in launch(saved_alone, str(tmp_path), ranks=2):
        assert found.pop("names")
        assert max(found.values()) < 1e-12, found
