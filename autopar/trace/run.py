"""Run a traced graph as it is: an `nn.Module` that is called as the model is called."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from autopar.errors import AutoparError
from autopar.trace.arguments import bind_call, flatten_arguments, signature_of, without_defaults
from autopar.trace.exported import Exported
from autopar.trace.normalise import is_factory
from autopar.trace.state import Autocast, autocast_state, entered
from autopar.trace.tree import Flattened, Mapped, difference, unflatten

__all__ = ["TracedModule"]


class TracedModule(nn.Module):
    """The model's parameters and buffers, under their names, with the traced graph in place of its forward."""

    def __init__(self, model: nn.Module, exported: Exported) -> None:
        super().__init__()
        _share_tensors(model, self)
        self.train(model.training)
        # not registered: the model owns the tensors already, and state_dict() must not see them twice
        object.__setattr__(self, "_traced", _Traced(model, exported))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        traced: _Traced = self._traced  # type: ignore[assignment]
        return traced.call(self, args, kwargs)


class _Traced:
    def __init__(self, model: nn.Module, exported: Exported) -> None:
        self.exported = exported
        self.owner = type(model).__name__
        self.signature = signature_of(model)
        self.inputs = tuple(
            (p, exported.graph_module.graph.find_nodes(op="placeholder")[i].meta["val"])
            for i, p in enumerate(exported.placeholders)
            if p.kind == "input"
        )
        self.mutated = {mutation.target for mutation in exported.mutations}
        self.graphs: dict[torch.device | None, GraphModule] = {}

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        exported = self.exported
        self._check_state(module)
        arguments = bind_call(self.signature, self.owner, args, kwargs, AutoparError)
        flat = flatten_arguments(arguments, self.owner, AutoparError)
        self._check_inputs(flat)
        tensors = dict(module.named_parameters(remove_duplicate=False))
        tensors.update(module.named_buffers(remove_duplicate=False))
        device = next((tensor.device for tensor in tensors.values()), None)
        values: list[torch.Tensor] = []
        given = iter(flat.tensors)
        for placeholder in exported.placeholders:
            if placeholder.kind == "input":
                value = next(given)
            elif placeholder.kind == "constant":
                value = exported.constants[placeholder.name]
            else:
                value = tensors[placeholder.name]
            if exported.grad_enabled and placeholder.name in self.mutated:
                value = value.clone()  # the backward may read the old value after the new one is written
            values.append(value)
        with entered(exported.autocast, enabled=False):  # the graph has the casts in it already
            outputs = self._graph(device)(*values)
        self._write_back(outputs, tensors, flat)
        containers = flat.containers
        reused = {number: containers[mine] for number, mine in exported.output_tree.reused.items()}
        rest = outputs[len(exported.mutations) :]
        (result, _), _ = unflatten(exported.output_tree.node, rest, containers, reused)
        return result

    def _check_state(self, module: nn.Module) -> None:
        exported = self.exported
        pairs = (
            ("training", exported.training, module.training),
            ("gradients enabled", exported.grad_enabled, torch.is_grad_enabled()),
            ("autocast", _said(exported.autocast), _said(autocast_state())),
        )
        for what, traced, now in pairs:
            if traced != now:
                raise AutoparError(
                    f"{self.owner} was traced with {what} = {traced} and is called with {what} = {now}: trace it again in this state"
                )

    def _check_inputs(self, flat: Flattened) -> None:
        assert isinstance(flat.node, Mapped), "arguments are a dict"
        traced, given = (without_defaults(self.signature, node) for node in (self.exported.input_tree, flat.node))
        if (place := difference(traced, given)) is not None:
            raise AutoparError(f"{self.owner} is called otherwise than it was traced: {place}. Trace it again with these inputs")
        for (placeholder, val), tensor in zip(self.inputs, flat.tensors, strict=True):
            if tensor.shape != val.shape or tensor.dtype != val.dtype:
                raise AutoparError(
                    f"{self.owner} was traced with {placeholder.name} of shape {tuple(val.shape)} and dtype {val.dtype}, and is "
                    f"called with shape {tuple(tensor.shape)} and dtype {tensor.dtype}. Trace it again with these inputs"
                )

    def _write_back(self, outputs: tuple[torch.Tensor, ...], tensors: dict[str, torch.Tensor], flat: Flattened) -> None:
        given = dict(zip((p.name for p, _ in self.inputs), flat.tensors, strict=True))
        for mutation in self.exported.mutations:
            target = tensors[mutation.target] if mutation.kind == "buffer" else given[mutation.target]
            if target.requires_grad:
                target.copy_(outputs[mutation.output])
            else:
                with torch.no_grad():
                    target.copy_(outputs[mutation.output])

    def _graph(self, device: torch.device | None) -> GraphModule:
        """The graph with its factories placed on `device`, where the parameters are now."""
        if device not in self.graphs:
            self.graphs[device] = _placed(self.exported, device)
        return self.graphs[device]


def _placed(exported: Exported, device: torch.device | None) -> GraphModule:
    graph = copy.deepcopy(exported.graph_module.graph)
    for node in graph.nodes:
        if node.kwargs.get("device") is not None and node.kwargs["device"] == exported.device:
            node.update_kwarg("device", device)
        elif is_factory(node) and "device" not in node.kwargs:
            node.update_kwarg("device", device)
    return GraphModule(nn.Module(), graph)


def _share_tensors(model: nn.Module, target: nn.Module) -> None:
    """Register every parameter and buffer of `model` in `target` under its name; tied ones stay one tensor."""
    for name, module in model.named_modules(remove_duplicate=False):
        here = target
        for part in filter(None, name.split(".")):
            if part not in here._modules:
                here.add_module(part, nn.Module())
            here = here.get_submodule(part)
        here._parameters.update(module._parameters)
        here._buffers.update(module._buffers)
        here._non_persistent_buffers_set.update(module._non_persistent_buffers_set)


def _said(autocast: tuple[Autocast, ...]) -> str:
    return ", ".join(map(str, autocast)) or "off"

