"""Refuse wrappers, conversions and compilers of torch that a parallel module does not work under.

Each of them would fail later with an error of its own, leave the module half changed, or stop the process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from autopar.errors import AutoparError
from autopar.tracing.trace import AlreadyParallel

__all__ = [
    "FSDP_MARK",
    "UNTRACED",
    "check_conversion",
    "check_hook",
    "check_not_captured",
    "refuse",
    "refuse_capture",
    "watch_wrappers",
]

# FullyShardedDataParallel and fully_shard set this attribute on every module below them.
FSDP_MARK = "_is_fsdp_managed_module"

WRAPPED = (
    "{wrapper} cannot wrap a parallel module: its layout splits the parameters and sends the gradients already\n"
    'fix: call the parallel module itself; layout="ddp" or "fsdp" does what the wrapper does; of a model that has it '
    "inside, wrap the other modules one by one"
)
SHARED = (
    "a parallel module cannot be moved to shared memory: every rank has shards of its own\n"
    "fix: give other processes the whole weights, full_tensor() of each entry of state_dict()"
)
MOVED = (
    "a parallel module cannot be moved to {to}: its mesh and process group run on {device}\n"
    "fix: parallelize the model and inputs on {to}; to read weights there, take full_tensor() of each entry of "
    "state_dict()"
)
CAPTURED = (
    "a parallel module cannot be exported, scripted or traced: its graph sends through process groups\n"
    "fix: export the model itself, with the whole weights loaded; torch.compile of a parallel module works"
)
# Dynamo prints it where it meets the ends of a call: in the log of graph breaks, and as the error of a strict export.
UNTRACED = (
    "the two ends of a call of a parallel module run in Python; torch.compile compiles the graph between them, "
    "torch.export cannot export it: export the model itself"
)

_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)
_HOOKS: list[Any] = []


def refuse(wrapper: str) -> NoReturn:
    """Raise for a wrapper that splits parameters or sends gradients."""
    raise AutoparError(WRAPPED.format(wrapper=wrapper))


def watch_wrappers() -> None:
    """Raise when DistributedDataParallel or DataParallel takes a parallel module, or one that has it inside."""
    if not _HOOKS:
        _HOOKS.append(register_module_module_registration_hook(_check_wrapper))


def _check_wrapper(wrapper: nn.Module, name: str, module: nn.Module | None) -> None:
    if module is None or not isinstance(wrapper, _WRAPPERS):
        return
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    for path, inner in module.named_modules():
        if isinstance(inner, AlreadyParallel):
            parameters = nn.Module.named_parameters(inner, prefix=path)
            if isinstance(wrapper, nn.DataParallel) or any(name not in ignored for name, _ in parameters):
                refuse(type(wrapper).__name__)


def check_hook(hook: Callable[..., Any]) -> None:
    """Raise if a forward hook is one by which fully_shard or replicate begin to manage a module."""
    origin = type(getattr(hook, "__self__", None)).__module__
    if origin.startswith(("torch.distributed.fsdp.", "torch.distributed._composable.")):
        refuse("replicate" if "replicate" in origin else "fully_shard")


def check_conversion(convert: Callable[[Tensor], Tensor], kinds: set[torch.dtype], device: torch.device) -> bool:
    """Raise if a conversion of all tensors (`to`, `cuda`, `share_memory`) takes them off the device of the mesh.

    Return whether it changes one of these dtypes.
    """
    probes = {kind: convert(torch.empty(0, dtype=kind, device=device)) for kind in kinds}
    for probe in probes.values():
        if probe.device.type == "cpu" and probe.is_shared():  # type: ignore[no-untyped-call]
            raise AutoparError(SHARED)
        if probe.device != device:
            raise AutoparError(MOVED.format(to=probe.device, device=device))
    return any(probe.dtype != kind for kind, probe in probes.items())


def check_not_captured() -> None:
    """Raise within torch.export and torch.jit.trace."""
    # In torch 2.11 `is_exporting` is true within torch.compile too. A strict export stops at UNTRACED instead.
    exporting = torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
    if exporting or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        refuse_capture()


def refuse_capture() -> NoReturn:
    """Raise for torch.export, torch.jit.script and torch.jit.trace, whose graphs cannot hold process groups."""
    raise AutoparError(CAPTURED)
