"""Several processes on one GPU over Gloo: loss and gradients beside those of one process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import autopar
from autopar.lowering.collectives import stage_messages
from autopar.lowering.modules import pipeline_loop
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.shards import REGATHER
from examples.gpt import gpt
from examples.moe import moe
from examples.resnet import resnet
from tests.runtime.launcher import launch

__all__ = ["ranks"]

RING = "op @*/folded_attention[s -> cp, t -> cp]"
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
    "micro": ("fsdp=2", f"micro 2; {REGATHER}", "gpt"),
    "offload": ("dp=2", "batch -> dp; * -> none; recompute offload @blocks.*", "wide"),
    "pieces": ("tp=2", "pieces 4; vocab -> tp; * -> none", "gpt"),
    "fold_gather": ("cp=2", "fold seq; seq -> cp; * -> none", "llama"),
    "fold_ring": ("cp=2", f"fold seq; seq -> cp; {RING}; * -> none", "llama"),
    "rows_to_experts": ("ep=2", "batch -> ep; @*experts* { expert -> ep }", "mixtral"),
    "pipeline": ("pp=2", "micro 4; pipeline pp 1f1b; * -> none", "llama"),
}
# Largest relative difference by dtype. Transformers' models compute parts of a step in float32, some products only so;
# normalised gradients of the ResNet, and those of many rows, are noise in bfloat16.
LIMITS = {
    "gpt": {torch.float64: 1e-9, torch.bfloat16: 6e-2},
    "llama": {torch.float64: 1e-6, torch.bfloat16: 6e-2},
    "mixtral": {torch.float32: 1e-4},
    "resnet": {torch.float64: 1e-9},
    "wide": {torch.float64: 1e-9},
}
SECONDS = 120
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
                found: dict[str, Any] = launch(compare, chosen, staged, ranks=count, seconds=SECONDS)[0]
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
        mesh, layout, model = CASES[name]
        for dtype, limit in LIMITS.get(model, LIMITS["gpt"]).items():
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
    module = autopar.parallelize(
        model, mesh, inputs, layout=layout, outputs="full" if name in ("gpt", "moe", "resnet") else "loss"
    )
    expected = _loss(model(**inputs))
    expected.backward()
    _loss(module(**inputs)).backward()
    module.zero_grad()
    loss = _loss(module(**inputs))  # the second step uses buffers again
    loss.backward()
    worst = float((loss.detach() - expected.detach()).abs() / expected.abs())
    gradients: dict[str, Any] = {path: parameter.grad for path, parameter in model.named_parameters()}
    floor = 1e-3 * max(float(gradient.abs().max()) for gradient in gradients.values())
    for path, parameter in module.named_parameters():
        whole: Any = parameter.grad
        gap = (whole.full_tensor().double() - gradients[path].double()).abs().max()
        worst = max(worst, float(gap) / max(floor, float(gradients[path].abs().max())))
    return worst


def _loss(result: Any) -> Any:
    return result if isinstance(result, Tensor) else result.loss


def _model(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    if name == "gpt":
        return gpt(layers=2, d_model=64, heads=4, vocab=128, seq=16, batch=8)
    if name == "wide":  # its saved tensors are large enough to be moved
        return gpt(layers=3, d_model=128, heads=4, vocab=128, seq=128, batch=8)
    if name == "moe":
        return moe(batch=8)
    if name in ("llama", "mixtral"):
        return _transformers(name)
    return resnet(batch=4, width=8, image=128, loss=True, train=True)


def _transformers(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    import transformers

    sizes: dict[str, Any] = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
    model: nn.Module
    if name == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    else:
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(num_local_experts=4, **sizes))
    ids = torch.randint(128, (8, 32))
    return model, {"input_ids": ids, "labels": ids}


@dataclass
class _Arriving:
    """A message to the host, copied to the device when it is waited for."""

    work: Any
    host: Tensor
    x: Tensor

    def wait(self) -> None:
        self.work.wait()
        self.x.copy_(self.host)


def _send_by_host(x: Tensor, group: ProcessGroup, place: int, tag: int = 0) -> Any:
    return group.send([x.detach().cpu()], place, tag)


def _receive_by_host(x: Tensor, group: ProcessGroup, place: int, tag: int = 0) -> Any:
    host = torch.empty_like(x, device="cpu")
    return _Arriving(group.recv([host], place, tag), host, x)


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
    rewritten: Any
    for rewritten in (stage_messages, pipeline_loop):
        rewritten.send, rewritten.receive = _send_by_host, _receive_by_host
    in_place = by_host("all_reduce")
    library.impl("all_reduce_", lambda x, *rest: x.copy_(in_place(x, *rest)), "CUDA")  # type: ignore[no-untyped-call]
    return library
