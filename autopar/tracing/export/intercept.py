"""Watch the forward while it is captured, for what torch.export would lose without a word."""

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
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode
from torch.fx.proxy import TracerBase

from autopar.errors import TraceError
from autopar.ir.fx_graphs import is_random
from autopar.rules.torch_versions import original_apply
from autopar.tracing.export.autograd_functions import as_op
from autopar.tracing.export.refuse import Refusal
from autopar.tracing.export.source_lines import CHECKPOINT, stack_of_model
from autopar.tracing.passes.no_grad_regions import apply_grad_modes

__all__ = ["check_autocast", "check_hooks", "new_attributes_removed", "random_ops_kept", "watched"]

# autograd functions that torch makes or uses itself, whose gradients do not depend on a lost backward
_HARMLESS_MODULES = ("torch._library.", "torch._functorch.", "torch._higher_order_ops.")


@contextmanager
def watched(ambient_grad: bool, device: torch.device | None) -> Iterator[None]:
    """Stand-ins for the few functions of torch through which gradients get lost."""

    def keep_grad_modes(module: GraphModule, signature: ExportGraphSignature) -> tuple[GraphModule, Any]:
        apply_grad_modes(module.graph, signature, ambient_grad)
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
            (function, "apply", classmethod(_kept_apply(original_apply()))),
            (torch.Tensor, "register_hook", _refused_hook("register_hook")),
            (torch.Tensor, "register_post_accumulate_grad_hook", _refused_hook("register_post_accumulate_grad_hook")),
            (torch.autograd, "grad", _refused_gradient("torch.autograd.grad")),
            (torch.autograd, "backward", _refused_gradient("backward()")),
            (torch, "tensor", _keeping_data(torch.tensor)),
            (torch.Tensor, "new_tensor", _new_tensor),
            (torch.nn.modules.transformer, "_detect_is_causal_mask", _said_to_be_causal),
            (torch.distributions.Distribution, "_validate_args", False),  # it asks values, and changes none
            (torch.inference_mode, "__enter__", _entering_without_grad(torch.inference_mode.__enter__)),
            (torch.inference_mode, "__exit__", _exiting_without_grad(torch.inference_mode.__exit__)),
            (export_trace, "print", _print_nothing),
            (TracerBase, "create_node", _with_stack(TracerBase.create_node)),
            (checkpoint, "_checkpoint_without_reentrant_generator", regions.generator),
            (checkpoint, "CheckpointFunction", _Reentrant(regions)),
        ):
            stack.enter_context(_swapped(owner, name, value))
        yield


@contextmanager
def random_ops_kept() -> Iterator[None]:
    """While this stands, no random op counts as dead code: the next one would draw other numbers."""
    original = Node.is_impure

    def is_impure(node: Node, impure_random: bool = True) -> bool:
        return is_random(node) or original(node, impure_random)

    with _swapped(Node, "is_impure", is_impure):
        yield


@contextmanager
def new_attributes_removed(model: nn.Module) -> Iterator[None]:
    """torch.export takes back what a forward changes on a module, but not what it adds."""
    tables = [t for module in model.modules() for t in (module.__dict__, module._buffers, module._modules)]
    before = [frozenset(table) for table in tables]
    try:
        yield
    finally:
        for table, names in zip(tables, before, strict=True):
            for name in table.keys() - names:
                del table[name]


@contextmanager
def _swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    there = name in owner.__dict__
    original = owner.__dict__.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if there:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


def check_autocast(device: torch.device | None, node: Node | None = None) -> None:
    if device is not None and device.type == "meta":
        raise Refusal(
            "autocast does nothing on the meta device, so the trace would lack its casts",
            "trace the model on the device it will run on, or cast it yourself: model.to(torch.bfloat16)",
            node,
        )


def _refused_gradient(name: str) -> Callable[..., Any]:
    def gradient(*args: Any, **kwargs: Any) -> Any:
        raise Refusal(
            f"the forward itself computes gradients, by {name}",
            "write this part as an operator: torch.library.custom_op with register_fake and register_autograd",
        )

    return gradient


def _keeping_data(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`torch.tensor` on meta forgets the numbers; made on the CPU and moved, they stay in the graph as a constant."""

    def tensor(data: Any, *, device: Any = None, **rest: Any) -> torch.Tensor:
        target = torch.get_default_device() if device is None else torch.device(device)
        if target.type != "meta":
            return original(data, device=device, **rest)
        return original(data, device="cpu", **rest).to(target)

    return tensor


def _new_tensor(like: torch.Tensor, data: Any, *, dtype: Any = None, device: Any = None, **rest: Any) -> torch.Tensor:
    return torch.tensor(data, dtype=dtype or like.dtype, device=like.device if device is None else device, **rest)


def _said_to_be_causal(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
    """`nn.Transformer` reads a mask to find a faster way to the same; unread, the mask is used as it is."""
    return is_causal is True


def _entering_without_grad(original: Callable[..., Any]) -> Callable[..., Any]:
    """A graph has no inference mode; what it means for gradients is what no_grad means."""

    def enter(mode: Any) -> None:
        if mode.mode:
            mode.grad_before = torch.is_grad_enabled()
            torch._C._set_grad_enabled(False)
        else:
            original(mode)  # torch leaves a surrounding inference mode this way

    return enter


def _exiting_without_grad(original: Callable[..., Any]) -> Callable[..., Any]:
    def exit_mode(mode: Any, *error: Any) -> None:
        if mode.mode:
            torch._C._set_grad_enabled(mode.grad_before)
        else:
            original(mode, *error)

    return exit_mode


def _print_nothing(*args: Any, **kwargs: Any) -> None:
    """torch.export prints the graph so far when it fails; the user gets a TraceError instead."""


def _with_stack(original: Callable[..., Node]) -> Callable[..., Node]:
    def create_node(tracer: TracerBase, *args: Any, **kwargs: Any) -> Node:
        tracer.record_stack_traces = False  # torch's cost ten times as much
        node = original(tracer, *args, **kwargs)
        if not node.stack_trace:
            node.stack_trace = stack_of_model()
        return node

    return create_node


def _kept_apply(original: Callable[..., Any]) -> Callable[..., Any]:
    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if f"{cls.__module__}.".startswith(_HARMLESS_MODULES):
            return original(cls, *args, **kwargs)
        return as_op(cls, args)

    return apply


def _refused_hook(name: str) -> Callable[..., Any]:
    def hook(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        raise Refusal(
            f"the hook set by Tensor.{name} would be lost",
            "write what the hook does as an operator: torch.library.custom_op with register_autograd",
        )

    return hook


def check_hooks(model: nn.Module) -> None:
    """Refuse hooks on gradients that were set before the trace: nothing in the graph would call them."""
    for path, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise TraceError(
                f"{type(model).__name__} cannot be traced: the module {path!r} ({type(module).__name__}) has a "
                "backward hook, which the traced graph would not call\n  what to do: remove the hook before tracing"
            )
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise TraceError(
                f"{type(model).__name__} cannot be traced: the parameter {name!r} has a gradient hook, "
                "which the traced graph would not call\n  what to do: remove the hook before tracing"
            )


class _CheckpointRegions:
    """Marks the nodes captured between the two ends of `torch.utils.checkpoint.checkpoint`.

    A region inside a region belongs to the outer one.
    """

    def __init__(self) -> None:
        self.count = 0
        self.depth = 0

    @contextmanager
    def region(self) -> Iterator[None]:
        graph = _graph_being_captured()
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
        """In place of the one in torch.utils.checkpoint: nothing is recomputed while capturing."""
        with self.region():
            yield


class _Reentrant:
    """In place of `CheckpointFunction`, whose forward runs without gradients."""

    def __init__(self, regions: _CheckpointRegions) -> None:
        self.regions = regions

    def apply(self, function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        with self.regions.region():
            return function(*args)


def _graph_being_captured() -> Graph:
    modes = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    for mode in modes:
        if isinstance(mode, PreDispatchTorchFunctionMode):
            return mode.tracer.graph
    raise AssertionError("a forward is captured under PreDispatchTorchFunctionMode")
