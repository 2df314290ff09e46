"""Several processes on one GPU over Gloo: loss and gradients beside those of one process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.shards import REGATHER
from examples.gpt import gpt
from examples.moe import moe
from examples.resnet import resnet
from tests.runtime.launcher import launch

__all__ = ["ranks"]

# Mesh, layout and model.
CASES: dict[str, tuple[str, str, str]] = {
    "ddp": ("dp=2", "ddp", "gpt"),
    "zero1": ("dp=2", "zero1", "gpt"),
    "fsdp": ("fsdp=2", "fsdp", "gpt"),
    "fsdp_regather": ("fsdp=2", REGATHER, "gpt"),
    "megatron": ("tp=2", "megatron", "gpt"),
    "recompute": ("tp=2", "heads -> tp; d_ff -> tp; * -> none; recompute full @blocks.*", "gpt"),
    "seq_split": ("sp=2", "seq -> sp; * -> none", "gpt"),
    "gshard_moe": ("ep=2", "gshard_moe", "moe"),
    "spatial": ("sy=2", "height -> sy; * -> none", "resnet"),
    "megatron_sp": ("dp=2,tp=2", "megatron_sp", "gpt"),
    "fsdp_tp": ("fsdp=2,tp=2", "fsdp_tp", "gpt"),
}
TINY = ("ddp", "fsdp_regather")


def ranks(setting: Setting) -> None:
    """All cases in float64 and bfloat16; where Gloo cannot send from the GPU, a second time by way of the host."""
    names = TINY if setting.tiny else tuple(CASES)
    for count in (2, 4):
        chosen = tuple(name for name in names if _size(CASES[name][0]) == count)
        for staged in (False, True) if setting.has_gpu and chosen else (False,):
            if not chosen:
                continue
            name = f"gloo_{count}{'_staged' * staged}"

            def run(chosen: tuple[str, ...] = chosen, count: int = count, staged: bool = staged) -> Mapping[str, Any]:
                found: dict[str, Any] = launch(compare, chosen, staged, ranks=count, seconds=60)[0]
                return found

            setting.part(name, run)
            if "failed" not in setting.found[name]:
                break


def _size(mesh: str) -> int:
    return prod(int(axis.partition("=")[2]) for axis in mesh.split(","))


def compare(names: tuple[str, ...], staged: bool) -> dict[str, Any]:
    """Run by every rank: the largest relative difference of each case."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    library = stage_collectives() if staged else None
    found: dict[str, Any] = {"staged": library is not None}
    for name in names:
        for dtype, limit in ((torch.float64, 1e-9), (torch.bfloat16, 6e-2)):
            mesh, layout, model = CASES[name]
            if dtype == torch.bfloat16 and model == "resnet":  # its normalised gradients are noise in bfloat16
                continue
            worst = _worst(model, mesh, layout, dtype, device)
            if not worst <= limit:
                raise AssertionError(f"{name} in {dtype}: {worst:.1e} is more than {limit:.0e}")
            found[f"{name} {str(dtype).removeprefix('torch.')}"] = worst
    return found


def _worst(name: str, mesh: str, layout: str, dtype: torch.dtype, device: torch.device) -> float:
    torch.manual_seed(0)
    model, inputs = _model(name)
    model = model.to(device, dtype)
    inputs = {
        path: value.to(device, dtype if value.is_floating_point() else value.dtype) for path, value in inputs.items()
    }
    module = autopar.parallelize(model, mesh, inputs, layout=layout, outputs="full")
    expected = model(**inputs)
    expected.backward()
    loss = module(**inputs)
    loss.backward()
    module.zero_grad()
    loss = module(**inputs)  # the second step uses buffers again
    loss.backward()
    worst = float((loss - expected).abs() / expected.abs())
    gradients: dict[str, Any] = {path: parameter.grad for path, parameter in model.named_parameters()}
    floor = 1e-3 * max(float(gradient.abs().max()) for gradient in gradients.values())
    for path, parameter in module.named_parameters():
        whole: Any = parameter.grad
        gap = (whole.full_tensor().double() - gradients[path].double()).abs().max()
        worst = max(worst, float(gap) / max(floor, float(gradients[path].abs().max())))
    return worst


def _model(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    if name == "gpt":
        return gpt(layers=2, d_model=64, heads=4, vocab=128, seq=16, batch=8)
    if name == "moe":
        return moe(batch=8)
    return resnet(batch=4, width=8, image=128, loss=True, train=True)


def stage_collectives() -> torch.library.Library:
    """Send the functional collectives of CUDA tensors by way of the host: correct, and slow."""
    library = torch.library.Library("_c10d_functional", "IMPL")  # type: ignore[no-untyped-call]
    ops = torch.ops._c10d_functional

    def by_host(name: str) -> Any:
        def run(x: Any, *arguments: Any) -> Any:
            several = isinstance(x, list)
            given = [one.detach().cpu().contiguous() for one in (x if several else [x])]
            sent = getattr(ops, name)(given if several else given[0], *arguments)
            back = [ops.wait_tensor(one).to((x[0] if several else x).device) for one in (sent if several else [sent])]
            return back if several else back[0]

        return run

    names = ["all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"]
    names += ["all_gather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"]
    for name in names:
        library.impl(name, by_host(name), "CUDA")  # type: ignore[no-untyped-call]
    in_place = by_host("all_reduce")
    library.impl("all_reduce_", lambda x, *rest: x.copy_(in_place(x, *rest)), "CUDA")  # type: ignore[no-untyped-call]
    return library
