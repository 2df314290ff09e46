"""Optimizers, norms of gradients and schedules on the parameters of a parallel module; what each rank holds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, get_total_norm

import autopar
from autopar.runtime.module import ParallelModule
from examples.gpt import gpt
from tests.runtime.launcher import in_turn, launch
from tests.runtime.training import Inputs, batches, error_of, gap, gradient_gap, losses

LAYOUTS = (
    ("fsdp", "fsdp=4"),
    ("megatron", "dp=2,tp=2"),
    ("fsdp_tp", "fsdp=2,tp=2"),
    ("zero1", "dp=4"),
)


def model_and_inputs() -> tuple[nn.Module, Inputs]:
    torch.manual_seed(0)
    model, inputs = gpt(batch=4, seq=8, vocab=40, d_model=16, layers=1)
    return model.double(), inputs


# -- norms of gradients -----------------------------------------------------------------------------------------------


def clip() -> dict[str, Any]:
    """Norms, clipped gradients, and what is said of gradients that are not finite."""
    model, inputs = model_and_inputs()
    found: dict[str, Any] = {}
    for layout, mesh in LAYOUTS:
        parallel = autopar.parallelize(copy.deepcopy(model), mesh, inputs, layout=layout)
        for norm_type, foreach in ((2.0, True), (2.0, False), (1.0, None), (float("inf"), None)):
            alone = copy.deepcopy(model)
            for each in (alone, parallel):
                each.zero_grad()
                each(**inputs).backward()
            total = get_total_norm([p.grad for p in parallel.parameters() if p.grad is not None], norm_type)
            expected = clip_grad_norm_(alone.parameters(), 0.1, norm_type, foreach=foreach)
            norm = clip_grad_norm_(parallel.parameters(), 0.1, norm_type, foreach=foreach)
            gaps = [gap(norm, expected), gap(total, expected), gradient_gap(alone, parallel)]
            if norm_type != float(
                "inf"
            ):  # of a maximum torch gives each rank its own part: full_tensor() of it is right
                gaps.append(abs(norm.item() / expected.item() - 1))
            found[f"{layout}, {norm_type}, {foreach}"] = max(gaps)
        for parameter in parallel.parameters():
            parameter.grad = parameter.grad * float("nan")
        raised = error_of(
            lambda p=parallel: clip_grad_norm_(p.parameters(), 0.1, error_if_nonfinite=True),  # type: ignore[misc]
            RuntimeError,
        )
        found[f"{layout}, not finite"] = "non-finite" in raised
    return found


# -- what a rank holds ------------------------------------------------------------------------------------------------

ZERO2 = "batch -> dp; * -> none; grad, opt { * -> dp | none }"
ZERO3 = "batch -> dp; * -> none; param, grad, opt { * -> dp | none }"


def hold() -> dict[str, tuple[int, int, int]]:
    """Bytes of parameters, of gradients and of Adam's moments that this rank holds under each layout."""
    model, inputs = model_and_inputs()
    found = {}
    for layout, mesh in (
        ("ddp", "dp=4"),
        ("zero1", "dp=4"),
        (ZERO2, "dp=4"),
        (ZERO3, "dp=4"),
        ("fsdp", "fsdp=4"),
        ("fsdp_tp", "fsdp=2,tp=2"),
        ("megatron", "tp=4"),
    ):
        parallel = autopar.parallelize(copy.deepcopy(model), mesh, inputs, layout=layout)
        optimizer = torch.optim.AdamW(parallel.parameters())
        parallel(**inputs).backward()
        optimizer.step()
        moments = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
        gradients = [parameter.grad for parameter in parallel.parameters() if parameter.grad is not None]
        found[layout] = memory_bytes(parallel.parameters()), memory_bytes(gradients), memory_bytes(moments)
    return found


def memory_bytes(tensors: Any) -> int:
    """What the storages of the shards take, each counted once."""
    storages = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return sum(storages.values())


# -- optimizers -------------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD, foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "Adam, foreach": lambda p: torch.optim.Adam(p, lr=3e-3, foreach=True),
    "Adam, one by one": lambda p: torch.optim.Adam(p, lr=3e-3, foreach=False, amsgrad=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=3e-3, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=3e-3),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=3e-3, momentum=0.5),
    "AdamW, groups": lambda p: grouped(list(p)),
}


def grouped(parameters: list[Tensor]) -> torch.optim.Optimizer:
    """Decay for matrices only, as training scripts group parameters."""
    matrices = [parameter for parameter in parameters if parameter.ndim > 1]
    rest = [parameter for parameter in parameters if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=3e-3)


def optimize() -> dict[str, float]:
    """The losses of a few steps beside those of one process, under every optimizer and layout."""
    model, inputs = model_and_inputs()
    data = batches(inputs, 4)
    found = {}
    chosen = (("fsdp", "fsdp=4"), ("fsdp_tp", "fsdp=2,tp=2"))
    layouts = [(layout, autopar_of(model, inputs, layout, mesh)) for layout, mesh in chosen]
    for name, make in OPTIMIZERS.items():
        alone = copy.deepcopy(model)
        expected = losses(alone, data, make(alone.parameters()))
        for layout, parallel in layouts:
            parallel.load_state_dict(model.state_dict())
            other = losses(parallel, data, make(parallel.parameters()))
            weights = max(gap(p, alone.get_parameter(n)) for n, p in parallel.named_parameters())
            found[f"{name}, {layout}"] = max(weights, *(abs(a / b - 1) for a, b in zip(other, expected, strict=True)))
    return found


def factorise() -> dict[str, Any]:
    """Adafactor takes means over whole dims in place, which DTensor does for whole parameters only."""
    model, inputs = model_and_inputs()
    data = batches(inputs, 4)
    alone = copy.deepcopy(model)
    expected = losses(alone, data, torch.optim.Adafactor(alone.parameters()))
    parallel = autopar_of(model, inputs, "ddp", "dp=4")
    found = losses(parallel, data, torch.optim.Adafactor(parallel.parameters()))
    split = autopar_of(model, inputs, "fsdp", "fsdp=4")
    return {
        "whole": max(abs(a / b - 1) for a, b in zip(found, expected, strict=True)),
        "split": error_of(lambda: losses(split, data, torch.optim.Adafactor(split.parameters())), RuntimeError),
    }


def autopar_of(model: nn.Module, inputs: Inputs, layout: str, mesh: str) -> ParallelModule:
    return autopar.parallelize(copy.deepcopy(model), mesh, inputs, layout=layout)


def schedule() -> dict[str, float]:
    """A warm-up and a decay; a plateau; the averaged weights of a run."""
    model, inputs = model_and_inputs()
    data = batches(inputs, 6)
    parallel = autopar_of(model, inputs, "fsdp", "fsdp=4")
    found = {}
    for name, make in (
        ("one cycle", lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1e-2, total_steps=6)),
        ("plateau", lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0)),
    ):
        alone = copy.deepcopy(model)
        parallel.load_state_dict(model.state_dict())
        curves = [run(each, data, make) for each in (alone, parallel)]
        found[name] = max(abs(a / b - 1) for a, b in zip(*curves, strict=True))
    return found


def run(model: nn.Module, data: list[Inputs], make: Callable[[torch.optim.Optimizer], Any]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = make(optimizer)
    found = []
    for inputs in data:
        found += losses(model, [inputs], optimizer)
        plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        scheduler.step(*([found[-1]] if plateau else []))
    return found


@pytest.mark.slow
def test_norms_are_those_of_one_process() -> None:
    for found in launch(in_turn, (clip, ()), ranks=4):
        gaps = {case: value for case, value in found["clip"].items() if not isinstance(value, bool)}
        assert len(gaps) == 4 * len(LAYOUTS)
        assert {case: worst for case, worst in gaps.items() if not worst < 1e-12} == {}
        assert [case for case, said in found["clip"].items() if said is False] == []


@pytest.mark.slow
def test_each_rank_holds_its_share() -> None:
    model, _ = model_and_inputs()
    sizes = {name: parameter.numel() * 8 for name, parameter in model.named_parameters()}
    total = sum(sizes.values())
    split = [
        name for name in sizes if any(part in name for part in ("tokens", "qkv", "up.", "out.weight", "down.weight"))
    ]
    by_tp = sum(sizes[name] for name in split)
    biases = sum(sizes[name] for name in split if name.endswith("bias"))  # of one dim, which tp has taken
    expected = {
        "ddp": total,
        "zero1": total // 4,
        ZERO2: total // 4,
        ZERO3: total // 4,
        "fsdp": total // 4,
        "fsdp_tp": (by_tp - biases) // 4 + biases // 2 + (total - by_tp) // 2,
        "megatron": by_tp // 4 + (total - by_tp),
    }
    for found in launch(in_turn, (hold, ()), ranks=4):
        assert found["hold"] == {layout: (held, held, 2 * held) for layout, held in expected.items()}


@pytest.mark.slow
def test_optimizers_take_the_steps_of_one_process() -> None:
    for found in launch(in_turn, (optimize, ()), (schedule, ()), (factorise, ()), ranks=4):
        assert len(found["optimize"]) == 2 * len(OPTIMIZERS)
        gaps = {**found["optimize"], **found["schedule"], "Adafactor": found["factorise"]["whole"]}
        assert {case: worst for case, worst in gaps.items() if not worst < 1e-9} == {}
        assert "in-place operations that require placement changes" in found["factorise"]["split"]
