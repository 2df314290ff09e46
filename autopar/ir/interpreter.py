"""Modules that run a traced graph unchanged, with the signature and the parameters of the model."""

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
from autopar.ir.fx_graphs import with_checkpoints
from autopar.ir.pytree import Flattened, Mapped, difference, unflatten
from autopar.rules.shard_call.device_kernels import take_device_kernels
from autopar.rules.shard_call.sparse_rows import store_sparsely


class TracedModule(nn.Module):
    """Module with the model's parameters and buffers, under their names, and the traced graph as its forward."""

    def __init__(self, model: nn.Module, exported: Exported) -> None:
        super().__init__()
        _share(model, self, {})
        self.train(model.training)
        self._call = TracedCall(type(model).__name__, model, exported)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self, args, kwargs)


def _share(model: nn.Module, shell: nn.Module, shells: dict[int, nn.Module]) -> nn.Module:
    """Give `shell` the parameter and buffer tables of `model`, so that both see the same tensors."""
    # The tables themselves are shared, because `to` and `to_empty` replace the tensors in them.
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
    """One traced call: check that arguments and modes equal those of the trace, run the graph, copy mutations back."""

    def __init__(self, owner: str, model: nn.Module, exported: Exported) -> None:
        self.exported = exported
        self.owner = owner
        self.signature = signature_of(model)
        self.traced_arguments = without_defaults(self.signature, exported.input_tree)
        nodes = exported.graph_module.graph.find_nodes(op="placeholder")
        pairs = zip(exported.placeholders, nodes, strict=True)
        self.inputs = {p.name: node.meta["val"] for p, node in pairs if p.kind == "input"}
        self.mutated = {mutation.target for mutation in exported.mutations}
        # The graph and its constants, by the device of the module.
        self.placed: dict[torch.device | None, tuple[GraphModule, Mapping[str, torch.Tensor]]] = {}

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        exported = self.exported
        self._check_state(module)
        arguments = bind_call(self.signature, self.owner, args, kwargs, AutoparError)
        flat = flatten_arguments(arguments, self.owner, AutoparError)
        self._check_inputs(flat)
        tensors: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
        tensors.update(module.named_buffers(remove_duplicate=False))
        given = dict(zip(self.inputs, flat.tensors, strict=True))
        if self.mutated and not torch.compiler.is_compiling():
            check_overlaps(self.owner, self.mutated, given, tensors)
        devices = {tensor.device for tensor in (tensors or given).values()}
        graph_module, constants = self.graph_on(devices.pop() if len(devices) == 1 else None)
        sources = {"param": tensors, "buffer": tensors, "constant": constants, "input": given}
        values = []
        for placeholder in exported.placeholders:
            value = self.local_value(sources[placeholder.kind][placeholder.name])
            if exported.grad_enabled and placeholder.name in self.mutated:
                # The backward may read the old value after the new one is written.
                value = value.clone()
            values.append(value)
        # The graph already contains the casts of autocast.
        with entered(exported.autocast, enabled=False):
            outputs = graph_module(*values)
        for mutation in exported.mutations:
            target = sources[mutation.kind][mutation.target]
            # Autograd follows changes of inputs, but buffers must not keep the graph of a step alive.
            with torch.set_grad_enabled(torch.is_grad_enabled() and mutation.kind == "input"):
                target.copy_(outputs[mutation.output])
        reused = {number: flat.containers[mine] for number, mine in exported.output_tree.reused.items()}
        rest = self.results(outputs[len(exported.mutations) :])
        (result, _), _ = unflatten(exported.output_tree.node, rest, flat.containers, reused)
        return result

    def local_value(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of a tensor of the module or of the call that the graph takes: here all of it."""
        return tensor

    def results(self, outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the results for the caller: here those of the graph."""
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
        """Return the graph and its constants for a module on `device`; None for several devices."""
        if device not in self.placed:
            self.placed[device] = _place(self.exported, device)
        return self.placed[device]


def _place(exported: Exported, device: torch.device | None) -> tuple[GraphModule, dict[str, torch.Tensor]]:
    graph = copy.deepcopy(exported.graph_module.graph)
    constants = dict(exported.constants)
    home = exported.device
    if home is not None and device is not None:
        for node in graph.nodes:
            named = exported.device_for(node, device)
            if named is not None:
                node.update_kwarg("device", named)
        constants = exported.constants_on(device)
    if device is not None:
        take_device_kernels(graph, device.type)
    store_sparsely(graph)
    return with_checkpoints(graph), constants


def _text(autocast: tuple[Autocast, ...]) -> str:
    return ", ".join(map(str, autocast)) or "off"


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
