"""Intercept the functions of torch through which an export would lose gradients or data without an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch._export.passes.replace_autocast_with_hop_pass as autocast_pass
import torch._export.passes.replace_set_grad_with_hop_pass as set_grad_pass
import torch.export._trace as export_trace
import torch.utils.checkpoint as checkpoint
from torch import nn
from torch.export.graph_signature import ExportGraphSignature
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode, PythonKeyTracer
from torch.fx.proxy import TracerBase

from autopar.errors import TraceError
from autopar.ir.fx_graphs import is_random
from autopar.rules.torch_versions import original_apply
from autopar.tracing.export.autograd_functions import apply_as_op
from autopar.tracing.export.refuse import CHECKPOINT, Refusal, stack_of_model
from autopar.tracing.layers.ops import layer_marks
from autopar.tracing.passes.no_grad_regions import no_grad_regions

# Autograd functions of torch itself, whose gradients torch.export keeps.
_HARMLESS_MODULES = ("torch._library.", "torch._functorch.", "torch._higher_order_ops.")


@contextmanager
def intercept_torch(ambient_grad: bool, device: torch.device | None) -> Iterator[None]:
    """Replace the functions of torch through which gradients or data get lost, during a capture."""

    def keep_grad_modes(module: GraphModule, signature: ExportGraphSignature) -> tuple[GraphModule, Any]:
        no_grad_regions(module.graph, signature, ambient_grad)
        return module, signature

    def keep_autocast(module: GraphModule, signature: ExportGraphSignature) -> tuple[GraphModule, Any]:
        for node in module.graph.nodes:
            if node.target is torch.amp.autocast_mode._enter_autocast and node.args[2]:
                check_autocast(device, node)
        return module, signature

    regions = _CheckpointRegions()
    function = torch.autograd.function.Function
    with ExitStack() as stack:
        for owner, name, value in (
            (set_grad_pass, "replace_set_grad_with_hop_pass", keep_grad_modes),
            (autocast_pass, "replace_autocast_with_hop_pass", keep_autocast),
            (function, "apply", classmethod(_apply_as_op(original_apply()))),
            (torch.Tensor, "register_hook", _refuse_hook("register_hook")),
            (torch.Tensor, "register_post_accumulate_grad_hook", _refuse_hook("register_post_accumulate_grad_hook")),
            (torch.autograd, "grad", _refuse_gradient("torch.autograd.grad")),
            (torch.autograd, "backward", _refuse_gradient("backward()")),
            (torch, "tensor", _tensor_with_data(torch.tensor)),
            (PythonKeyTracer, "create_arg", _refuse_parameter(PythonKeyTracer.create_arg)),
            (torch.Tensor, "new_tensor", _new_tensor),
            # nn.Transformer reads the data of a mask to select a faster kernel; unread, the mask is used unchanged.
            (
                torch.nn.modules.transformer,
                "_detect_is_causal_mask",
                lambda mask, is_causal=None, size=None: bool(is_causal),
            ),
            # Statistics of a traced batch are those of the whole batch, on any ranks.
            (nn.SyncBatchNorm, "forward", nn.BatchNorm2d.forward),
            # The validation of a distribution reads data and changes nothing.
            (torch.distributions.Distribution, "_validate_args", False),
            (torch.inference_mode, "__enter__", _enter_no_grad(torch.inference_mode.__enter__)),
            (torch.inference_mode, "__exit__", _exit_no_grad(torch.inference_mode.__exit__)),
            # torch.export prints the graph so far when it fails; the user gets a TraceError.
            (export_trace, "print", lambda *args, **kwargs: None),
            (TracerBase, "create_node", _record_stack(TracerBase.create_node)),
            (checkpoint, "_checkpoint_without_reentrant_generator", regions.generator),
            (checkpoint, "CheckpointFunction", _Reentrant(regions)),
        ):
            stack.enter_context(_swap(owner, name, value))
        yield


@contextmanager
def keep_unused_ops() -> Iterator[None]:
    """Keep random ops without users, for all later ops would draw other numbers, and the marks of layers."""
    original = Node.is_impure

    def is_impure(node: Node, impure_random: bool = True) -> bool:
        return is_random(node) or node.target in layer_marks() or original(node, impure_random)

    with _swap(Node, "is_impure", is_impure):
        yield


@contextmanager
def remove_new_attributes(model: nn.Module) -> Iterator[None]:
    """Remove attributes that the forward adds to a module; torch.export only restores those it changes."""
    tables = [t for module in model.modules() for t in (module.__dict__, module._buffers, module._modules)]
    before = [frozenset(table) for table in tables]
    try:
        yield
    finally:
        for table, names in zip(tables, before, strict=True):
            for name in table.keys() - names:
                del table[name]


@contextmanager
def _swap(owner: Any, name: str, value: Any) -> Iterator[None]:
    is_own = name in owner.__dict__
    original = owner.__dict__.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


def check_autocast(device: torch.device | None, node: Node | None = None) -> None:
    """Raise for autocast on the meta device."""
    if device is not None and device.type == "meta":
        raise Refusal(
            "autocast does nothing on the meta device, so the trace would lack its casts",
            "trace the model on the device it will run on, or cast it yourself: model.to(torch.bfloat16)",
            node,
        )


def _refuse_gradient(name: str) -> Callable[..., Any]:
    def gradient(*args: Any, **kwargs: Any) -> Any:
        raise Refusal(
            f"the forward itself computes gradients, by {name}",
            "write this part as an operator: torch.library.custom_op with register_fake and register_autograd",
        )

    return gradient


def _tensor_with_data(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    # On meta `torch.tensor` drops its data; built on the CPU and moved, the data is a constant of the graph.
    def tensor(data: Any, *, device: Any = None, **rest: Any) -> torch.Tensor:
        target = torch.get_default_device() if device is None else torch.device(device)
        if target.type != "meta":
            return original(data, device=device, **rest)
        return original(data, device="cpu", **rest).to(target)

    return tensor


def _new_tensor(like: torch.Tensor, data: Any, *, dtype: Any = None, device: Any = None, **rest: Any) -> torch.Tensor:
    return torch.tensor(data, dtype=dtype or like.dtype, device=like.device if device is None else device, **rest)


def _enter_no_grad(original: Callable[..., Any]) -> Callable[..., Any]:
    # A graph has no inference mode; for gradients it is equal to no_grad.
    def enter(mode: Any) -> None:
        if mode.mode:
            mode.grad_before = torch.is_grad_enabled()
            torch._C._set_grad_enabled(False)
        else:
            # With mode=False torch leaves a surrounding inference mode.
            original(mode)

    return enter


def _exit_no_grad(original: Callable[..., Any]) -> Callable[..., Any]:
    def exit_mode(mode: Any, *error: Any) -> None:
        if mode.mode:
            torch._C._set_grad_enabled(mode.grad_before)
        else:
            original(mode, *error)

    return exit_mode


def _record_stack(original: Callable[..., Node]) -> Callable[..., Node]:
    def create_node(tracer: TracerBase, *args: Any, **kwargs: Any) -> Node:
        # torch's stack traces cost ten times as much as `stack_of_model`.
        tracer.record_stack_traces = False
        node = original(tracer, *args, **kwargs)
        if not node.stack_trace:
            node.stack_trace = stack_of_model()
        return node

    return create_node


def _apply_as_op(original: Callable[..., Any]) -> Callable[..., Any]:
    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if f"{cls.__module__}.".startswith(_HARMLESS_MODULES):
            return original(cls, *args, **kwargs)
        return apply_as_op(cls, args)

    return apply


def _refuse_parameter(create_arg: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return `create_arg` of a tracer, which gets a parameter itself only if the export does not know it."""

    def created(tracer: Any, value: Any) -> Any:
        if isinstance(value, nn.Parameter) and value.requires_grad:
            raise Refusal(
                f"it uses a parameter of shape {list(value.shape)} that is not one of the model, or is one that a "
                "function holds, and it would not be trained",
                "register the module that has it as an attribute of the model, and read the parameter from the module "
                "in the forward; or freeze it with requires_grad_(False)",
            )
        return create_arg(tracer, value)

    return created


def _refuse_hook(name: str) -> Callable[..., Any]:
    def hook(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        raise Refusal(
            f"the hook set by Tensor.{name} would be lost",
            "write the hook as an operator: torch.library.custom_op with register_autograd",
        )

    return hook


def check_hooks(model: nn.Module) -> None:
    """Raise for gradient hooks that were set before the trace, which the graph would not call."""
    for path, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise TraceError(
                f"{type(model).__name__} cannot be traced: the module {path!r} ({type(module).__name__}) has a "
                "backward hook, which the traced graph would not call\nfix: remove the hook before tracing"
            )
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise TraceError(
                f"{type(model).__name__} cannot be traced: the parameter {name!r} has a gradient hook, "
                "which the traced graph would not call\nfix: remove the hook before tracing"
            )


class _CheckpointRegions:
    """Marks of the nodes captured inside `torch.utils.checkpoint.checkpoint`; the outermost region counts."""

    def __init__(self) -> None:
        self.count = 0
        self.depth = 0

    @contextmanager
    def region(self) -> Iterator[None]:
        modes = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        graph = next((mode.tracer.graph for mode in modes if isinstance(mode, PreDispatchTorchFunctionMode)), None)
        assert graph is not None, "a forward is captured under PreDispatchTorchFunctionMode"
        last = next(iter(reversed(graph.nodes)))
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1
        if self.depth == 0:
            for node in reversed(graph.nodes):
                if node is last:
                    break
                node.meta["custom"] = {**node.meta.get("custom", {}), CHECKPOINT: self.count}
            self.count += 1

    def generator(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Replace the generator of torch.utils.checkpoint, without a recompute during the capture."""
        with self.region():
            yield


class _Reentrant:
    """Replacement of `CheckpointFunction`, whose forward would run without gradients."""

    def __init__(self, regions: _CheckpointRegions) -> None:
        self.regions = regions

    def apply(self, function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        with self.regions.region():
            return function(*args)
