"""Parameters and gradients may be written to in every way that plain ones may: the next forward sees it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from tests.runtime.launcher import in_turn, launch

ZERO1 = "batch -> dp; * -> none\nopt { * -> dp | none }"
LAYOUTS = (("ddp", "dp=2"), (ZERO1, "dp=2"), ("fsdp", "fsdp=2"), ("megatron", "dp=1,tp=2"))


def made(layout: str, mesh: str) -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)).double()
    x = torch.randn(8, 8, dtype=torch.float64)
    names = {"0.weight": "d_ff d_model"}
    parallel = autopar.parallelize(copy.deepcopy(model), mesh, (x,), layout=layout, dims=names, outputs="full")
    return model, parallel, x


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gap(given: Any, expected: Tensor) -> float:
    given = given.full_tensor() if isinstance(given, DTensor) else given
    return float((given - expected).detach().abs().max() / expected.detach().abs().max())


def gradient_gap(model: nn.Module, parallel: nn.Module) -> float:
    pairs = zip(parallel.parameters(), model.parameters(), strict=True)
    return max(gap(mine.grad, theirs.grad) for mine, theirs in pairs if theirs.grad is not None)


def replace(module: nn.Module) -> None:
    for name, parameter in list(module.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, nn.Parameter(parameter.detach() * 1.5))


def inside(parameter: Any) -> Tensor:
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def of_each(write: Callable[[Any], object]) -> Callable[[nn.Module], None]:
    def run(module: nn.Module) -> None:
        for parameter in module.parameters():
            write(parameter)

    return run


def shards(module: nn.Module) -> list[Tensor]:
    return [local(parameter) for parameter in module.parameters()]


@torch.inference_mode()
def in_inference_mode(module: nn.Module) -> None:
    for shard in shards(module):
        shard.mul_(1.5)


WRITES: dict[str, Callable[[nn.Module], object]] = {
    "mul_": of_each(lambda p: p.mul_(1.5)),
    "data": of_each(lambda p: p.data.mul_(1.5)),
    "detach": of_each(lambda p: p.detach().mul_(1.5)),
    "copy_": of_each(lambda p: p.copy_(p * 1.5)),
    "init": of_each(lambda p: nn.init.constant_(p, 0.3)),
    "to_local": of_each(lambda p: local(p).mul_(1.5)),
    "a piece": of_each(lambda p: local(p).view(-1)[:].mul_(1.5)),
    "_local_tensor": of_each(lambda p: inside(p).copy_(inside(p) * 1.5)),
    "to_local().data": of_each(lambda p: local(p).data.mul_(1.5)),
    "numpy": of_each(lambda p: local(p).detach().numpy().__imul__(1.5)),
    "foreach": lambda module: torch._foreach_mul_(list(module.parameters()), 1.5),
    "foreach of shards": lambda module: torch._foreach_lerp_(shards(module), [x + 1 for x in shards(module)], 0.5),
    "inference mode": in_inference_mode,
    "state dict": lambda module: module.load_state_dict({n: x * 1.5 for n, x in module.state_dict().items()}),
    "assigned": lambda module: module.load_state_dict({n: x * 2 for n, x in module.state_dict().items()}, assign=True),
    "replaced": replace,
}


def write_parameters() -> dict[str, float]:
    found = {}
    for layout, mesh in LAYOUTS:
        model, parallel, x = made(layout, mesh)
        for name, write in WRITES.items():
            parallel(x).square().mean().backward()  # what is remembered of it must not be read again
            parallel(x)
            for module in (model, parallel):
                with torch.no_grad():
                    write(module)
                module.zero_grad()
            given, expected = parallel(x), model(x)
            found[f"{layout}: {name}"] = gap(given, expected)
            given.square().mean().backward()
            expected.square().mean().backward()
            found[f"{layout}: gradients after {name}"] = gradient_gap(model, parallel)
            parallel.load_state_dict(model.state_dict())
    return found


def write_while_gradients_are_added_up() -> dict[str, float]:
    """What was gathered once for several forwards is gathered again."""
    found = {}
    for layout, mesh in (LAYOUTS[0], LAYOUTS[1]):
        model, parallel, x = made(layout, mesh)
        for name, write in WRITES.items():
            with parallel.no_sync():  # type: ignore[operator]
                parallel(x).square().mean().backward()
                model(x).square().mean().backward()
                for module in (model, parallel):
                    with torch.no_grad():
                        write(module)
                found[f"{layout}, not sent: {name}"] = gap(parallel(x), model(x))
            parallel.load_state_dict(model.state_dict())
    return found


def write_gradients() -> dict[str, float]:
    found = {}
    for layout, mesh in LAYOUTS:
        model, parallel, x = made(layout, mesh)
        for module in (model, parallel):
            for _ in range(2):
                module(x).square().mean().backward()
                for parameter in module.parameters():
                    assert parameter.grad is not None
                    local(parameter.grad).mul_(2)
                    parameter.grad.add_(parameter.grad)
                    parameter.grad.data.mul_(0.3)
            torch._foreach_mul_([p.grad for p in module.parameters() if p.grad is not None], 0.5)
        found[f"{layout}: gradients"] = gradient_gap(model, parallel)
    return found


def average() -> dict[str, float]:
    """An average of the weights, written and swapped in as users' own classes do it."""
    found = {}
    for layout, mesh in LAYOUTS:
        model, parallel, x = made(layout, mesh)
        results = []
        for module in (model, parallel):
            optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
            kept: Sequence[Tensor] = [shard.detach().clone() for shard in shards(module)]
            for _ in range(3):
                optimizer.zero_grad()
                module(x).square().mean().backward()
                optimizer.step()
                for shadow, shard in zip(kept, shards(module), strict=True):
                    shadow.mul_(0.9).add_(shard.detach(), alpha=0.1)
            with torch.no_grad():
                for shadow, shard in zip(kept, shards(module), strict=True):
                    shard.copy_(shadow)
            results.append(module(x))
        found[f"{layout}: average"] = gap(results[1], results[0])
    return found


def everything() -> dict[str, Any]:
    functions = (write_parameters, write_while_gradients_are_added_up, write_gradients, average)
    return in_turn(*((function, ()) for function in functions))


def test_what_is_written_is_seen() -> None:
    for found in launch(everything, ranks=2):
        for gaps in found.values():
            assert gaps
            for name, value in gaps.items():
                assert value < 1e-12, name
