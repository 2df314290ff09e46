"""Torch's own wrappers, conversions and compilers around a parallel module: each works or is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.errors import AutoparError
from tests.runtime.launcher import in_turn, launch
from tests.runtime.training import gap, gradients


def small() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8))
    return model.double(), torch.randn(4, 8, dtype=torch.float64)


def parallel_of(layout: str) -> tuple[nn.Module, Tensor]:
    model, x = small()
    return autopar.parallelize(model, "dp=2", (x,), layout=layout, outputs="full"), x


class Around(nn.Module):
    """A model of one's own with a parallel module inside."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside, self.head = inside, nn.Linear(8, 8).double()

    def forward(self, x: Tensor) -> Any:
        return self.head(self.inside(x))


def _ddp_beside(inside: nn.Module, x: Tensor) -> Tensor:
    """Train the head by DistributedDataParallel, which is told to leave the parallel module alone."""
    outside = Around(inside)
    names = [name for name, _ in outside.named_parameters() if name.startswith("inside.")]
    names += [name for name, _ in outside.named_buffers() if name.startswith("inside.")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(outside, names)
    found: Tensor = DistributedDataParallel(outside)(x)
    return found


REFUSED: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "DistributedDataParallel": lambda module, x: DistributedDataParallel(module),
    "DistributedDataParallel around": lambda module, x: DistributedDataParallel(Around(module)),
    "DataParallel": lambda module, x: nn.DataParallel(module),
    "fully_shard": lambda module, x: fully_shard(module),
    "FullyShardedDataParallel": lambda module, x: FullyShardedDataParallel(module, device_id=torch.device("cpu")),
    "FullyShardedDataParallel around": lambda module, x: FullyShardedDataParallel(
        Around(module), device_id=torch.device("cpu")
    ),
    "replicate": lambda module, x: replicate(module),
    "meta": lambda module, x: module.to("meta"),
    "empty on meta": lambda module, x: module.to_empty(device="meta"),
    "meta around": lambda module, x: Around(module).to("meta"),
    "share_memory": lambda module, x: module.share_memory(),
    "share_memory around": lambda module, x: nn.Sequential(module).share_memory(),
    "torch.export": lambda module, x: torch.export.export(module, (x,)),
    "torch.jit.script": lambda module, x: torch.jit.script(module),
    "torch.jit.trace": lambda module, x: torch.jit.trace(module, (x,), check_trace=False),
    "copy.copy": lambda module, x: copy.copy(module),
}
WORKS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "deepcopy": lambda module, x: copy.deepcopy(module)(x),
    "compile": lambda module, x: torch.compile(module, backend="eager")(x),
    "a module of one's own": lambda module, x: Around(module)(x),
    "beside DistributedDataParallel": _ddp_beside,
    "to the same device": lambda module, x: module.to("cpu")(x),
    "to its own dtype": lambda module, x: module.double()(x),
}


def refuse(layout: str) -> dict[str, tuple[str, float]]:
    """Return the error of each, and how far the module is from the model afterwards."""
    found = {}
    for name, call in REFUSED.items():
        module, x = parallel_of(layout)
        error = "no error"
        try:
            call(module, x)
        except AutoparError as refusal:
            error = str(refusal)
        found[name] = error, gap(module(x), small()[0](x))
    return found


def strict_export() -> str:
    module, x = parallel_of("fsdp(fsdp=dp)")
    with pytest.raises(Unsupported) as error:
        torch.export.export(module, (x,), strict=True)
    return str(error.value)


def refuse_without_parameters() -> dict[str, str]:
    """A module that was not traced yet has nothing that could be converted."""
    found = {}
    for name, convert in (("half", nn.Module.half), ("double", nn.Module.double), ("cpu", nn.Module.cpu)):
        model, x = small()
        module = autopar.parallelize(model, "dp=2", layout="ddp", outputs="full")
        try:
            convert(module)
            found[name] = str(gap(module(x), small()[0](x)) < 1e-12)
        except AutoparError as refusal:
            found[name] = str(refusal)
    return found


def work(layout: str) -> list[str]:
    """Return the names of those that give a tensor with a gradient."""
    found = []
    for name, call in WORKS.items():
        module, x = parallel_of(layout)
        call(module, x).square().mean().backward()
        found.append(name)
    return found


def convert_after_a_step(layout: str) -> dict[str, float]:
    """Return the difference of gradients from the model, which was converted as the parallel module was."""
    found = {}
    for name, dtype in (("half", torch.bfloat16), ("single", torch.float32)):
        (model, x), (module, _) = small(), parallel_of(layout)
        worst = 0.0
        for kind in (torch.float64, dtype, torch.float64):
            for each in (model, module):
                each.to(kind)
                each.zero_grad()
                each(x.to(kind)).square().mean().backward()
            for path, parameter in model.named_parameters():
                ours: Any = module.get_parameter(path)
                assert ours.dtype == ours.grad.dtype == kind
                worst = max(worst, gap(ours.grad, parameter.grad) if kind == torch.float64 else 0.0)
        found[name] = worst
    return found


@pytest.fixture(scope="module", params=["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def on_two(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    given = ((request.param,),)
    calls = [(function, *given) for function in (refuse, work, convert_after_a_step)]
    return launch(in_turn, *calls, (refuse_without_parameters, ()), ranks=2)


def test_wrappers_and_conversions_are_refused_by_name(on_two: list[dict[str, Any]]) -> None:
    for found in (one["refuse"] for one in on_two):
        for name, (error, difference) in found.items():
            assert "a parallel module" in error, (name, error)
            assert "\nfix: " in error, (name, error)
            assert difference < 1e-12, f"{name} left it changed"
        for name in ("DistributedDataParallel", "DataParallel", "fully_shard", "FullyShardedDataParallel", "replicate"):
            assert found[name][0].startswith(f"{name} cannot wrap a parallel module")
        for name in ("DistributedDataParallel", "FullyShardedDataParallel"):
            assert found[f"{name} around"][0].startswith(f"{name} cannot wrap a parallel module")
        assert "its mesh and process groups run on cpu" in found["meta"][0]


@pytest.mark.slow
def test_a_strict_export_names_the_fix() -> None:
    for found in launch(strict_export, ranks=2):
        assert "torch.export fails; export the original model instead" in found


def test_a_conversion_before_there_are_parameters_is_refused(on_two: list[dict[str, Any]]) -> None:
    for found in (one["refuse_without_parameters"] for one in on_two):
        assert "no parameters yet" in found["half"]
        assert found["double"] == found["cpu"] == "True", "nothing changes"


def test_others_work(on_two: list[dict[str, Any]]) -> None:
    for found in on_two:
        assert found["work"] == list(WORKS)


def test_a_converted_module_has_the_gradients_of_the_converted_model(on_two: list[dict[str, Any]]) -> None:
    for found in on_two:
        assert max(found["convert_after_a_step"].values()) < 1e-6, "the bias before BatchNorm has none"


def gradients_of_synchronised(layout: str) -> float:
    """Largest difference of the gradients of a model with a SyncBatchNorm from those of one process."""
    model, x = small()
    synchronised = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model))
    parallel = autopar.parallelize(synchronised, "dp=2", (x,), layout=layout, outputs="full")
    for module in (model, parallel):
        module(x).square().sum().backward()
    with pytest.raises(ValueError, match="expected input tensor to be on GPU"):  # its own forward is back
        synchronised(x)
    found, expected = gradients(parallel), gradients(model)
    assert found.keys() == expected.keys()
    # That of the bias before the normalisation is zero.
    return max(float((found[name] - one).abs().max()) for name, one in expected.items())


@pytest.mark.parametrize("layout", ["ddp", "fsdp(fsdp=dp)"])
def test_a_synchronised_batch_norm_is_that_of_the_whole_batch(layout: str) -> None:
    assert max(launch(gradients_of_synchronised, layout, ranks=2)) < 1e-12
