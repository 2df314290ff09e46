"""What training loops do, with stages: mixed precision, scalers, accumulation, compilers, dropout, checkpoints."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional

import autopar
from examples.gpt import gpt
from tests.runtime.launcher import launch
from tests.runtime.test_pipelines import CUT, loop_of, pair, small
from tests.runtime.training import adamw, batches, error_of, gradients, losses, worst

LAYOUT = "micro 4; pipeline pp 1f1b; * -> none"


def in_float32(layout: str, **options: Any) -> tuple[nn.Module, Any, dict[str, Tensor]]:
    torch.manual_seed(0)
    model, inputs = gpt(batch=8, seq=12, vocab=104)
    return model, autopar.parallelize(model, "pp=2", inputs, layout=layout, **options), inputs


def arithmetic() -> dict[str, float]:
    """Errors of gradients where the loop does more with the loss than `backward`."""
    found = {}
    model, parallel, inputs = pair(LAYOUT, "pp=2")
    for scale in (1.0, 65536.0, 0.3):
        for each in (model, parallel):
            each.zero_grad()
            (each(**inputs) * scale).backward()
        found[f"times {scale}"] = worst(gradients(parallel), gradients(model))
    for each in (model, parallel):
        each.zero_grad()
        for _ in range(3):
            (each(**inputs) / 3).backward()
    found["accumulated"] = worst(gradients(parallel), gradients(model))
    for each in (model, parallel):
        each.zero_grad()
        (each(**inputs) ** 2).backward()
    found["squared"] = worst(gradients(parallel), gradients(model))
    return found


def mixed() -> dict[str, Any]:
    """Errors of gradients against one process in the same precision."""
    found: dict[str, Any] = {}
    for dtype in (torch.bfloat16, torch.float16):
        model, parallel, inputs = in_float32(LAYOUT)
        model(**inputs).backward()
        exact = gradients(model)
        for name, each in (("alone", model), ("stages", parallel)):
            each.zero_grad()
            with torch.autocast("cpu", dtype):
                loss = each(**inputs)
            loss.backward()
            found[f"autocast {dtype} {name}"] = worst(gradients(each), exact)
    return found


def scaled() -> dict[str, Any]:
    """Steps under GradScaler in float16: zeros among the gradients, the scale, and a step with infinite gradients."""
    _, parallel, inputs = in_float32(LAYOUT, precision="fp16")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=1e-3)
    scales = []
    for _ in range(4):
        optimizer.zero_grad()
        scaler.scale(parallel(**inputs)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parallel.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    optimizer.zero_grad()
    before = [parameter.detach().clone().to_local() for parameter in parallel.parameters()]
    (scaler.scale(parallel(**inputs)) * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    pairs = zip(before, parallel.parameters(), strict=True)
    unchanged = all(torch.equal(one, other.to_local()) for one, other in pairs)
    # Of the same gradients, one process in float16 under that scale has no fewer zeros.
    parallel.zero_grad()
    (parallel(**inputs) * 2.0**14).backward()
    alone, _ = gpt(batch=8, seq=12, vocab=104)
    alone.load_state_dict({name: value.full_tensor() for name, value in parallel.state_dict().items()})
    with torch.autocast("cpu", torch.float16):
        loss = alone(**inputs)
    (loss * 2.0**14).backward()
    zeros = [sum(int((one == 0).sum()) for one in gradients(each).values()) for each in (parallel, alone)]
    return {"scales": scales, "unchanged": unchanged, "last": scaler.get_scale(), "zeros": zeros}


class DropsRows(nn.Module):
    """Each row of the result is known by the mask of its micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 64, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(self.last(self.first(x)), 0.5, self.training)


def dropped() -> dict[str, Any]:
    torch.manual_seed(0)
    x = torch.randn(8, 6)
    layout = "micro 4; pipeline pp 1f1b; cut pp before @last; * -> none"
    parallel = autopar.parallelize(DropsRows(), "pp=2", (x,), layout=layout, outputs="full")
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(parallel(x).detach())
    masks = (results[0] == 0).reshape(4, 2 * 64)
    model, inputs = small("dropout")
    exact = autopar.parallelize(model, "pp=2", inputs, layout=CUT)
    with exact.exact_randomness():
        refused = error_of(lambda: exact(*inputs))
    return {
        "same": torch.equal(results[0], results[1]),
        "other": not torch.equal(results[0], results[2]),
        "masks": len({tuple(mask.tolist()) for mask in masks}),
        "refused": refused,
        "result": results[0],
    }


def compiled() -> dict[str, float]:
    model, parallel, inputs = in_float32(LAYOUT)
    torch.compile(parallel)(**inputs).backward()
    model(**inputs).backward()
    return {"compiled": worst(gradients(parallel), gradients(model))}


def refused() -> dict[str, str]:
    """Errors of what runs of stages cannot do."""
    _, parallel, inputs = pair(LAYOUT, "pp=2")
    weight = parallel.get_parameter("norm.weight")
    assert loop_of(parallel).is_scheduled
    return {"second derivative": error_of(lambda: torch.autograd.grad(parallel(**inputs), weight, create_graph=True))}


def on_two_stages() -> dict[str, Any]:
    parts = (arithmetic, mixed, scaled, dropped, compiled, refused)
    return {part.__name__: part() for part in parts}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return launch(on_two_stages, ranks=2, seconds=300)


@pytest.mark.slow
def test_a_loop_may_compute_with_the_loss(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert max(each["arithmetic"].values()) < 1e-12, each["arithmetic"]


@pytest.mark.slow
def test_autocast_is_as_exact_as_on_one_process(found: list[dict[str, Any]]) -> None:
    for each in found:
        for dtype in (torch.bfloat16, torch.float16):
            alone, stages = (each["mixed"][f"autocast {dtype} {name}"] for name in ("alone", "stages"))
            assert stages < max(1.5 * alone, 1e-3), each["mixed"]
            assert stages > 1e-5, "it has computed in half precision"


@pytest.mark.slow
def test_a_scaler_scales_gradients_of_stages(found: list[dict[str, Any]]) -> None:
    for each in found:
        scaled = each["scaled"]
        assert scaled["scales"] == [2.0**14, 2.0**15, 2.0**15, 2.0**16]
        assert scaled["unchanged"], "a step with infinite gradients is skipped"
        assert scaled["last"] == 2.0**15
        stages, alone = scaled["zeros"]
        assert stages <= 1.01 * alone + 8


@pytest.mark.slow
def test_each_micro_batch_drops_other_values(found: list[dict[str, Any]]) -> None:
    for each in found:
        dropped = each["dropped"]
        assert dropped["same"]
        assert dropped["other"]
        assert dropped["masks"] == 4
        assert torch.equal(dropped["result"], found[0]["dropped"]["result"])
        assert "fix: " in dropped["refused"]


@pytest.mark.slow
def test_a_compiled_module_runs_stages(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert each["compiled"]["compiled"] < 2e-5


@pytest.mark.slow
def test_what_stages_cannot_do_is_refused(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert "no second derivative" in each["refused"]["second derivative"]


def resumed(folder: str) -> list[float]:
    """Losses of 6 steps on three meshes, each of which goes on where the one before has saved."""
    torch.manual_seed(0)
    model, inputs = gpt(batch=8, seq=12, vocab=104)
    data, found = batches(inputs, 6), []
    runs = [
        ("pp=4", LAYOUT),
        ("dp=2,tp=2", "fsdp_tp(fsdp=dp)"),
        ("pp=4", "micro 4; pipeline pp zero_bubble; * -> none"),
    ]
    for number, (mesh, layout) in enumerate(runs):
        if number:
            # Other weights, which the checkpoint replaces.
            model, _ = gpt(batch=8, seq=12, vocab=104)
        parallel = autopar.parallelize(model.double(), mesh, inputs, layout=layout)
        optimizer = adamw(parallel)
        if number:
            # Makes states to load into; it counts as a step of an optimizer without states.
            weights, states = get_state_dict(parallel, optimizer)
            state = {"model": weights, "optimizer": states}
            checkpoint.load(state, checkpoint_id=f"{folder}/{number - 1}")
            set_state_dict(parallel, optimizer, model_state_dict=weights, optim_state_dict=states)
        found += losses(parallel, data[2 * number : 2 * number + 2], optimizer)
        weights, states = get_state_dict(parallel, optimizer)
        checkpoint.save({"model": weights, "optimizer": states}, checkpoint_id=f"{folder}/{number}")
    return found


@pytest.mark.slow
def test_a_run_goes_on_under_another_layout_and_back() -> None:
    torch.manual_seed(0)
    model, inputs = gpt(batch=8, seq=12, vocab=104)
    model = model.double()
    expected = losses(model, batches(inputs, 6), adamw(model))
    with tempfile.TemporaryDirectory() as folder:
        for found in launch(resumed, folder, ranks=4, seconds=200):
            assert found == pytest.approx(expected, rel=1e-9)
