"""Refuse wrappers, conversions, compilers and optimizers of torch that do not work with a parallel module.

Without these checks each would fail later with an unrelated error, leave the module half changed, train nothing, or
end the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

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
    "watch_replaced",
    "watch_wrappers",
]

# FullyShardedDataParallel and fully_shard set this attribute on every module below them.
FSDP_MARK = "_is_fsdp_managed_module"

WRAPPED = (
    "{wrapper} cannot wrap a parallel module: the module already shards its parameters and reduces its gradients\n"
    'fix: call the parallel module directly; layout="ddp" or layout="fsdp" replaces the wrapper; if only a part of the '
    "model is parallel, wrap its other modules one by one"
)
SHARED = (
    "a parallel module cannot move to shared memory: each rank has its own shards\n"
    "fix: pass whole weights to other processes: full_tensor() of each entry of state_dict()"
)
MOVED = (
    "a parallel module cannot move to {to}: its mesh and process groups run on {device}\n"
    "fix: call parallelize with model and inputs on {to}; to read weights there, call full_tensor() of each entry of "
    "state_dict()"
)
CAPTURED = (
    "torch.export and torch.jit cannot capture a parallel module: its graph communicates through process groups\n"
    "fix: load the whole weights into the original model and export it; torch.compile works on a parallel module"
)
# Dynamo prints this at begin and end of a call: in the log of graph breaks, and as the error of a strict export.
UNTRACED = (
    "begin and end of a call of a parallel module run in Python: torch.compile compiles the graph between them, "
    "torch.export fails; export the original model instead"
)

_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)
# Parameters of models that were parallelised. A dictionary by id: a weak set would compare tensors by value.
_REPLACED: Any = WeakIdKeyDictionary()
# torch keeps these hooks for the whole process, so each is registered once.
_WRAPPER_HOOKS: list[Any] = []
_OPTIMIZER_HOOKS: list[Any] = []


def refuse(wrapper: str) -> NoReturn:
    """Raise for a wrapper that splits parameters or sends gradients."""
    raise AutoparError(WRAPPED.format(wrapper=wrapper))


def watch_wrappers() -> None:
    """Raise when DistributedDataParallel or DataParallel wraps a parallel module, at any depth."""
    if not _WRAPPER_HOOKS:
        _WRAPPER_HOOKS.append(register_module_module_registration_hook(_check_wrapper))


def _check_wrapper(wrapper: nn.Module, name: str, module: nn.Module | None) -> None:
    if module is None or not isinstance(wrapper, _WRAPPERS):
        return
    # DDP may wrap a model around a parallel module if it ignores all parameters of that module.
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    for path, inner in module.named_modules():
        if isinstance(inner, AlreadyParallel):
            # The method of `ParallelModule` raises as long as there are no parameters.
            parameters = nn.Module.named_parameters(inner, prefix=path)
            if isinstance(wrapper, nn.DataParallel) or any(name not in ignored for name, _ in parameters):
                refuse(type(wrapper).__name__)


def check_hook(hook: Callable[..., Any]) -> None:
    """Raise if a forward hook is the one by which fully_shard or replicate manage a module."""
    origin = type(getattr(hook, "__self__", None)).__module__
    if origin.startswith(("torch.distributed.fsdp.", "torch.distributed._composable.")):
        refuse("replicate" if "replicate" in origin else "fully_shard")


def watch_replaced(parameters: Iterable[Tensor]) -> None:
    """Raise at the step of an optimizer that updates parameters of the original model.

    An optimizer with a gradient in any of its parameters passes: that model is also trained by itself.
    """
    for parameter in parameters:
        _REPLACED[parameter] = True
    if not _OPTIMIZER_HOOKS:
        _OPTIMIZER_HOOKS.append(register_optimizer_step_post_hook(_check_optimizer))


def _check_optimizer(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if all(parameter.grad is None for parameter in parameters) and any(each in _REPLACED for each in parameters):
        raise AutoparError(
            f"{type(optimizer).__name__} updates parameters of the model that was passed to parallelize: "
            "the parallel module has its own parameters\n"
            "fix: create the optimizer after parallelize, from parameters() of the parallel module"
        )


def check_conversion(convert: Callable[[Tensor], Tensor], kinds: set[torch.dtype], device: torch.device) -> bool:
    """Raise if a conversion (`to`, `cuda`, `share_memory`) moves tensors off the mesh's device.

    Return whether it changes one of the dtypes `kinds`.
    """
    # `Module._apply` passes a function alone, so its effect is read from an empty tensor of each dtype.
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
    """Raise for torch.export and torch.jit, whose graphs cannot contain process groups."""
    raise AutoparError(CAPTURED)
