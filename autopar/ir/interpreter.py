"""Run a traced graph as it is: an `nn.Module` that is called as the model is called."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from autopar.errors import AutoparError
from autopar.ir.call_arguments import bind_call, check_overlaps, flatten_arguments, signature_of, without_defaults
from autopar.ir.exported import Autocast, Exported, autocast_state, entered
from autopar.ir.fx_graphs import is_factory, with_checkpoints
from autopar.ir.pytree import Flattened, Mapped, difference, unflatten
from autopar.rules.shard_call.grouped_heads import repeat_masked_heads


class TracedModule(nn.Module):
    """The model's parameters and buffers, under their names, with the traced graph in place of its forward."""

    def __init__(self, model: nn.Module, exported: Exported) -> None:
        super().__init__()
        _share(model, self, {})
        self.train(model.training)
        self._call = TracedCall(type(model).__name__, model, exported)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self, args, kwargs)


def _share(model: nn.Module, shell: nn.Module, shells: dict[int, nn.Module]) -> nn.Module:
    """Give `shell` the tables of `model`, so that both see one set of tensors, also after `to_empty` or `to`."""
    shells[id(model)] = shell
    shell._parameters = model._parameters
    shell._buffers = model._buffers
    shell._non_persistent_buffers_set = model._non_persistent_buffers_set
    for name, child in model._modules.items():
        if child is not None:
            made = shells[id(child)] if id(child) in shells else _share(child, nn.Module(), shells)
            shell.add_module(name, made)
    return shell


class TracedCall:
    """One traced call: checks that it is called as it was traced, runs the graph, writes back what it changed."""

    def __init__(self, owner: str, model: nn.Module, exported: Exported) -> None:
        self.exported = exported
        self.owner = owner
        self.signature = signature_of(model)
        self.traced_arguments = without_defaults(self.signature, exported.input_tree)
        nodes = exported.graph_module.graph.find_nodes(op="placeholder")
        pairs = zip(exported.placeholders, nodes, strict=True)
        self.inputs = {p.name: node.meta["val"] for p, node in pairs if p.kind == "input"}
        self.mutated = {mutation.target for mutation in exported.mutations}
        self.placed: dict[torch.device | None, tuple[GraphModule, Mapping[str, torch.Tensor]]] = {}

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        exported = self.exported
        self._check_state(module)
        arguments = bind_call(self.signature, self.owner, args, kwargs, AutoparError)
        flat = flatten_arguments(arguments, self.owner, AutoparError)
        self._check_inputs(flat)
        tensors: dict[str, torch.Tensor] = {}
        tensors.update(module.named_parameters(remove_duplicate=False))
        tensors.update(module.named_buffers(remove_duplicate=False))
        given = dict(zip(self.inputs, flat.tensors, strict=True))
        if self.mutated and not torch.compiler.is_compiling():
            check_overlaps(self.owner, self.mutated, given, tensors)
        graph_module, constants = self.graph_on(_device_of(tensors, given))
        sources = {"param": tensors, "buffer": tensors, "constant": constants, "input": given}
        values = []
        for placeholder in exported.placeholders:
            value = self.local_value(sources[placeholder.kind][placeholder.name])
            if exported.grad_enabled and placeholder.name in self.mutated:
                value = value.clone()  # the backward may read the old value after the new one is written
            values.append(value)
        with entered(exported.autocast, enabled=False):  # the graph has the casts in it already
            outputs = graph_module(*values)
        for mutation in exported.mutations:
            target = sources[mutation.kind][mutation.target]
            with torch.set_grad_enabled(torch.is_grad_enabled() and mutation.kind == "input"):
                target.copy_(outputs[mutation.output])
        reused = {number: flat.containers[mine] for number, mine in exported.output_tree.reused.items()}
        rest = self.results(outputs[len(exported.mutations) :])
        (result, _), _ = unflatten(exported.output_tree.node, rest, flat.containers, reused)
        return result

    def local_value(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the graph takes of a tensor of the module or of the call: here all of it."""
        return tensor

    def results(self, outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """What the caller gets of the graph's results: here the results."""
        return outputs

    def _check_state(self, module: nn.Module) -> None:
        exported = self.exported
        for what, traced, now in (
            ("training", exported.training, module.training),
            ("gradients enabled", exported.grad_enabled, torch.is_grad_enabled()),
            ("autocast", _text(exported.autocast), _text(autocast_state())),
        ):
            if traced != now:
                raise AutoparError(
                    f"{self.owner} was traced with {what}: {traced}, and is called with {what}: {now}. "
                    "Trace it again in this state."
                )

    def _check_inputs(self, flat: Flattened) -> None:
        assert isinstance(flat.node, Mapped), "arguments are a dict"
        place = difference(self.traced_arguments, without_defaults(self.signature, flat.node))
        if place is not None:
            raise AutoparError(
                f"{self.owner} is called otherwise than it was traced: {place}. Trace it again with these inputs."
            )
        for (name, val), tensor in zip(self.inputs.items(), flat.tensors, strict=True):
            if tensor.shape != val.shape or tensor.dtype != val.dtype:
                raise AutoparError(
                    f"{self.owner} was traced with {name}: {_kind(val)}, and is called with {name}: {_kind(tensor)}. "
                    "Trace it again with these inputs."
                )

    def graph_on(self, device: torch.device | None) -> tuple[GraphModule, Mapping[str, torch.Tensor]]:
        """The graph and its constants for a model that stands on `device` now."""
        if device not in self.placed:
            self.placed[device] = _place(self.exported, device)
        return self.placed[device]


def _device_of(tensors: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]) -> torch.device | None:
    devices = {tensor.device for tensor in (tensors or inputs).values()}
    return devices.pop() if len(devices) == 1 else None


def _place(exported: Exported, device: torch.device | None) -> tuple[GraphModule, dict[str, torch.Tensor]]:
    graph = copy.deepcopy(exported.graph_module.graph)
    constants = dict(exported.constants)
    home = exported.device
    if home is not None and device is not None:
        for node in graph.nodes:
            moved = node.kwargs.get("device") == home
            if moved or (is_factory(node) and "device" not in node.kwargs):
                node.update_kwarg("device", device)
        for name, tensor in exported.constants.items():
            if tensor.is_meta and device.type != "meta":
                raise AutoparError(
                    f"the tensor {name!r} was on the meta device when the model was traced, so its data is not known. "
                    "Register it as a buffer; then it gets its data with the model."
                )
            constants[name] = tensor.to(device) if tensor.device == home else tensor
    if device is not None:
        repeat_masked_heads(graph, device.type)
    return with_checkpoints(graph), constants


def _text(autocast: tuple[Autocast, ...]) -> str:
    return ", ".join(map(str, autocast)) or "off"


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
