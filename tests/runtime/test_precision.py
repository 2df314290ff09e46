"""Steps in half precision with float32 weights, beside one process that computes in the same dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from examples.gpt import gpt
from tests.runtime.launcher import launch
from tests.runtime.training import gradients

MESHES = {"fsdp": {"fsdp": 4}, "megatron": {"dp": 2, "tp": 2}}
STEPS = 50
SLOW = pytest.mark.slow


class WithLoss(nn.Module):
    """A GPT whose loss is computed in float32, as that of large models is."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt, _ = gpt(layers=2, d_model=32, heads=4, vocab=64, seq=16, batch=8)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(self.gpt(ids).float().flatten(0, 1), targets.flatten())


def small() -> tuple[nn.Module, list[dict[str, Tensor]]]:
    torch.manual_seed(0)
    model = WithLoss()
    torch.manual_seed(1)
    return model, [gpt(layers=1, d_model=32, heads=4, vocab=64, seq=16, batch=8)[1] for _ in range(4)]


def alone(dtype: torch.dtype, steps: int) -> list[float]:
    """Losses of one process: copies of float32 weights compute, and their gradients update the weights."""
    model, batches = small()
    copy, _ = small()
    copy.to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        with torch.no_grad():
            for weight, used in zip(model.parameters(), copy.parameters(), strict=True):
                used.copy_(weight)
        loss = copy(**batches[step % len(batches)])
        copy.zero_grad()
        loss.backward()
        for weight, used in zip(model.parameters(), copy.parameters(), strict=True):
            weight.grad = None if used.grad is None else used.grad.float()
        optimizer.step()
        losses.append(float(loss))
    return losses


def trained(layout: str, precision: str, steps: int) -> tuple[list[float], list[float], set[str]]:
    dtype = torch.bfloat16 if precision.startswith("bf16") else torch.float16
    expected = alone(dtype, steps)
    model, batches = small()
    mesh = ",".join(f"{axis}={size}" for axis, size in MESHES[layout].items())
    parallel = autopar.parallelize(model, mesh, batches[0], layout=layout, precision=precision, outputs="full")
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = parallel(**batches[step % len(batches)])
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    states = [state for each in optimizer.state.values() for state in each.values() if state.ndim]
    kinds = {str(one.dtype) for one in (*parallel.parameters(), *(p.grad for p in parallel.parameters()), *states)}
    return losses, expected, kinds


def check(found: list[float], expected: list[float]) -> None:
    assert expected[-1] < 0.95 * expected[0], "it learns"
    differences = [abs(one - other) / other for one, other in zip(found, expected, strict=True)]
    assert max(differences) < 2e-3, max(differences)


def test_bf16_with_float32_weights_trains_as_one_process() -> None:
    for losses, expected, kinds in launch(trained, "megatron", "bf16", STEPS, ranks=4):
        check(losses, expected)
        assert kinds == {"torch.float32"}, "weights, gradients and states"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "precision"), [("fsdp", "bf16"), ("fsdp", "bf16, reduce=bf16"), ("megatron", "fp16"), ("fsdp", "fp16")]
)
def test_other_layouts_and_dtypes_train_as_one_process(layout: str, precision: str) -> None:
    for losses, expected, kinds in launch(trained, layout, precision, STEPS, ranks=4):
        check(losses, expected)
        assert kinds == {"torch.float32"}


REGATHERED = "batch -> fsdp; * -> none; param, grad, opt { * -> fsdp | none }; regather @*; micro 2"


def gradients_alone() -> dict[str, Tensor]:
    """The gradients of one process in float64."""
    model, batches = small()
    loss: Tensor = model.double()(**batches[0])
    loss.backward()
    return gradients(model)


def regathered(mesh: str, layout: str, precision: str) -> tuple[float, set[torch.dtype]]:
    """The largest difference of a gradient, relative to its norm; the dtypes of all gradients."""
    model, batches = small()
    parallel = autopar.parallelize(model, mesh, batches[0], layout=layout, precision=precision, outputs="loss")
    for _ in range(2):  # the first backward decides how the second one begins
        parallel.zero_grad()
        (parallel(**batches[0]) * 2.0**10).backward()
    found, expected = gradients(parallel), gradients_alone()
    assert found.keys() == expected.keys()
    apart = ((found[name].double() / 2**10 - one).norm() / one.norm() for name, one in expected.items())
    return max(map(float, apart)), {one.dtype for one in found.values()}


@pytest.mark.parametrize(
    ("mesh", "layout", "precision"),
    [
        ("fsdp=2", REGATHERED, "bf16"),
        pytest.param("fsdp=2", REGATHERED, "bf16, reduce=bf16", marks=SLOW),
        pytest.param("fsdp=2", REGATHERED, "fp16", marks=SLOW),
        pytest.param("fsdp=2", f"{REGATHERED}; recompute full @gpt.blocks.*", "bf16", marks=SLOW),
        pytest.param("pp=2,fsdp=2", f"{REGATHERED}; pipeline pp 1f1b", "bf16", marks=SLOW),
        pytest.param(
            "pp=2,fsdp=2",
            f"{REGATHERED}; pipeline pp 1f1b; recompute full @gpt.blocks.*",
            "bf16",
            marks=pytest.mark.slow,
        ),
        pytest.param("pp=2,fsdp=2", f"{REGATHERED}; pipeline pp gpipe", "bf16", marks=SLOW),
    ],
)
def test_regathered_weights_of_micro_batches_have_gradients_in_float32(mesh: str, layout: str, precision: str) -> None:
    """A body gathers and reduces them in each micro-batch, and its loop adds them up."""
    ranks = 2 if mesh == "fsdp=2" else 4
    for apart, dtypes in launch(regathered, mesh, layout, precision, ranks=ranks):
        assert apart < 0.05, "the rounding of half precision"
        assert dtypes == {torch.float32}


SPLIT_TWICE = "batch -> dp; d_ff -> tp; * -> none; param, grad, opt { d_ff -> tp*dp }"


class Wide(nn.Module):
    """A product whose gradient is infinite in float16 where an input is large; ranks see other rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16, bias=False)
        self.down = nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x)).float().square().mean()


def scaled(layout: str, mesh: str) -> list[tuple[float, float, bool]]:
    """Steps under a scaler: its scale, the change of the weights, whether all is finite."""
    torch.manual_seed(0)
    model, x = Wide(), torch.randn(8, 8)
    parallel = autopar.parallelize(model, mesh, (x,), layout=layout, precision="fp16", outputs="full")
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    found = []
    for step in range(3):
        rows = x.clone()
        if step == 1:
            rows[0] = 3e4  # on one rank alone
        before = [parameter.full_tensor().clone() for parameter in parallel.parameters()]
        optimizer.zero_grad()
        scaler.scale(parallel(rows)).backward()
        scaler.step(optimizer)
        scaler.update()
        after = [parameter.full_tensor() for parameter in parallel.parameters()]
        moved = max(float((one - other).abs().max()) for one, other in zip(before, after, strict=True))
        found.append((scaler.get_scale(), moved, all(bool(one.isfinite().all()) for one in after)))
    return found


@pytest.mark.parametrize(
    ("layout", "mesh"),
    [
        ("ddp", "dp=2"),
        pytest.param("fsdp", "fsdp=4", marks=SLOW),
        pytest.param("megatron", "dp=2,tp=2", marks=SLOW),
        pytest.param(
            "batch -> dp; d_ff -> tp; * -> none; param, grad, opt { d_ff -> tp*dp }",
            "dp=2,tp=2",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_scaler_skips_the_step_of_all_ranks_where_one_overflows(layout: str, mesh: str) -> None:
    for found in launch(scaled, layout, mesh, ranks=4 if "4" in mesh or "tp" in mesh else 2):
        scales, moved, finite = zip(*found, strict=True)
        assert scales == (2.0**10, 2.0**9, 2.0**9)
        assert moved[0] > 0
        assert moved[1] == 0
        assert moved[2] > 0
        assert all(finite)


def stored(precision: str, layout: str) -> tuple[set[str], set[str], float]:
    """Dtypes of stored and computed tensors of a bfloat16 model, and what became of a weight that is no bfloat16."""
    model, batches = small()
    parallel = autopar.parallelize(model.bfloat16(), "dp=2", batches[0], layout=layout, precision=precision)
    state = {name: value.float() for name, value in model.state_dict().items()}
    state["gpt.norm.weight"][0] = 1 + 2.0**-12
    parallel.load_full_state_dict(state)
    calls = [parallel(**batch) for batch in batches]
    kept = {str(parameter.dtype) for parameter in parallel.parameters()}
    weight: Any = parallel.get_parameter("gpt.norm.weight")
    assert len(parallel._plans.kept) == 1, "no call is traced again"
    return kept, {str(loss.dtype) for loss in calls}, float(weight.full_tensor()[0])


def test_a_half_precision_model_gets_float32_weights() -> None:
    for kept, losses, weight in launch(stored, "bf16", "ddp", ranks=2):
        assert kept == {"torch.float32"}
        assert losses == {"torch.float32"}
        assert weight == 1 + 2.0**-12
    for kept, _, weight in launch(stored, "own", "ddp", ranks=2):
        assert kept == {"torch.bfloat16"}
        assert weight == 1


def from_plan(text: str) -> tuple[str, ...]:
    """Dtypes of the embeddings of a module under a plan's file, and under another precision."""
    model, batches = small()
    plan = autopar.Plan.read(text, autopar.trace(model, batches[0], precision="bf16"))
    parallel = autopar.parallelize(model, "dp=2", batches[0], layout=plan)
    other = autopar.parallelize(model, "dp=2", batches[0], layout=plan, precision="fp32")
    return tuple(str(one.graph.tensors["gpt.norm.weight"].dtype) for one in (parallel, other))


def test_a_module_computes_in_the_precision_of_its_plan() -> None:
    model, batches = small()
    plan = autopar.plan(model, "dp=2", batches[0], layout="ddp", precision="bf16", cluster="h100", cache=False)
    assert "#   precision       bf16\n" in plan.text
    assert launch(from_plan, plan.text, ranks=2) == [("torch.bfloat16", "torch.float32")] * 2


class Image(nn.Module):
    """Batch norms with and without weights, whose statistics are buffers in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))
        self.norm = nn.BatchNorm2d(8, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.norm(self.body(x)) - 1).square().mean()


def image_steps(mesh: str, layout: str, precision: str) -> dict[str, Tensor]:
    """Losses of a step in training and of one in evaluation, and the buffers behind them; in float64 without a mesh."""
    torch.manual_seed(0)
    model, x = Image(), torch.randn(8, 3, 10, 10)
    step: Any = model
    if mesh:
        step = autopar.parallelize(model, mesh, {"x": x}, layout=layout, precision=precision, outputs="loss")
    else:
        model, x = model.double(), x.double()
    loss = step(x=x)
    loss.backward()
    step.eval()
    with torch.no_grad():
        given = step(x=x)
    return {"loss": loss.detach(), "given": given, **{name: one.clone() for name, one in step.named_buffers()}}


@pytest.mark.parametrize(
    ("layout", "precision"),
    [("* -> none", "bf16"), ("batch -> dp; * -> none", "bf16"), ("* -> none", "fp16"), ("fsdp(fsdp=dp)", "bf16")],
)
def test_batch_norms_in_half_precision_have_statistics_in_float32(layout: str, precision: str) -> None:
    expected = image_steps("", "", "")
    for found in launch(image_steps, "dp=2", layout, precision, ranks=2):
        assert found.keys() == expected.keys()
        for name, one in expected.items():
            assert found[name].dtype != torch.bfloat16 or name in ("loss", "given"), name
            torch.testing.assert_close(found[name].to(one.dtype), one, rtol=0.02, atol=0.01, msg=name)
