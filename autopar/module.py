"""`ParallelModule`: the user's model, as far as a training loop can tell, on many devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.completion import Decisions
from autopar.layout.placements import to_placements
from autopar.layout.resolve import atoms_of
from autopar.layout.state import Layout
from autopar.rewrite.emit import Emitted, Outputs, emit
from autopar.rewrite.functions import Groups
from autopar.tracing.graph import NamedGraph
from autopar.tracing.run import TracedCall

__all__ = ["Collective", "ParallelModule"]


@dataclass(frozen=True)
class Collective:
    """One collective that a step runs: of which tensor, for which op, what it sends."""

    kind: str
    axes: tuple[str, ...]
    direction: str
    tensor: str
    op: str
    bytes: int

    def __str__(self) -> str:
        sent = f"{self.direction} {self.kind} over {'*'.join(self.axes)}"
        return f"{sent}: {self.bytes:,} bytes, {self.tensor} for {self.op}"


class ParallelModule(nn.Module):
    """Called as the model is; its parameters are DTensors under the model's names."""

    def __init__(
        self,
        graph: NamedGraph,
        decisions: Decisions,
        mesh: DeviceMesh,
        outputs: Outputs = "sharded",
        local_inputs: bool = False,
    ) -> None:
        super().__init__()
        groups = Groups(mesh)
        self.graph = graph
        self.decisions = decisions
        self.emitted = emit(graph, decisions, groups, outputs, local_inputs)
        _Sharding(graph, decisions, mesh, groups).build(graph.model, self)
        self.train(graph.exported.training)
        self._call = _ParallelCall(graph, decisions, mesh, self.emitted, outputs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self, args, kwargs)

    def collectives(self) -> tuple[Collective, ...]:
        """Every collective of one forward and backward, in the order of the graph."""
        return tuple(
            Collective(
                step.kind.value, step.axes, direction, inserted.tensor, inserted.op, step.numel * inserted.itemsize
            )
            for inserted in self.emitted.inserted
            for direction, step in inserted.collectives()
        )


class _ParallelCall(TracedCall):
    """One call: the traced call, on shards."""

    def __init__(
        self, graph: NamedGraph, decisions: Decisions, mesh: DeviceMesh, emitted: Emitted, outputs: Outputs
    ) -> None:
        super().__init__(type(graph.model).__name__, graph.model, graph.exported)
        self.graph = graph
        self.axes = decisions.axes
        self.mesh = mesh
        self.emitted = emitted
        self.outputs = outputs

    def graph_on(self, device: torch.device | None) -> tuple[Any, Mapping[str, Tensor]]:
        return self.emitted.graph_module, self.exported.constants

    def local_value(self, tensor: Tensor) -> Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def results(self, outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        if self.outputs != "sharded":
            return outputs
        return tuple(self._handed_out(*pair) for pair in zip(outputs, self.emitted.results, strict=True))

    def _handed_out(self, value: Any, place: tuple[str, Layout] | None) -> Any:
        if place is None or not place[1].axes:
            return value
        name, layout = place
        tensor = self.graph.tensors[name]
        placements = to_placements(layout, atoms_of(tensor), self.axes, name)
        return DTensor.from_local(
            value, self.mesh, placements, run_check=False, shape=torch.Size(tensor.shape), stride=_strides(tensor.shape)
        )


class _Sharding:
    """Makes the parameters of this rank: each a DTensor under its name, tied ones one."""

    def __init__(self, graph: NamedGraph, decisions: Decisions, mesh: DeviceMesh, groups: Groups) -> None:
        self.graph = graph
        self.decisions = decisions
        self.mesh = mesh
        self.groups = groups
        self.made: dict[int, nn.Parameter] = {}
        self.names = {id(p): name for name, p in graph.model.named_parameters()}

    def build(self, model: nn.Module, shell: nn.Module) -> None:
        for name, parameter in model._parameters.items():
            shell.register_parameter(name, None if parameter is None else self._parameter(parameter))
        for name, buffer in model._buffers.items():
            persistent = name not in model._non_persistent_buffers_set
            shell.register_buffer(name, None if buffer is None else buffer.detach().clone(), persistent)
        for name, child in model._modules.items():
            if child is not None:
                made = nn.Module()
                shell.add_module(name, made)
                self.build(child, made)

    def _parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        if id(parameter) not in self.made:
            self.made[id(parameter)] = nn.Parameter(self._sharded(parameter), parameter.requires_grad)
        return self.made[id(parameter)]

    def _sharded(self, parameter: nn.Parameter) -> DTensor:
        tensor = self.graph.tensors[self.names[id(parameter)]]
        layout, atoms, axes = self.decisions.stored[tensor.name], atoms_of(tensor), self.decisions.axes
        part = parameter.detach().reshape(atoms.sizes)
        for atom, (start, length) in enumerate(layout.pieces(atoms, axes, self.groups.coordinate)):
            part = part.narrow(atom, start, length)
        local = part.reshape(atoms.fold(tuple(part.shape))).clone()
        placements = to_placements(layout, atoms, axes, tensor.name)
        return DTensor.from_local(
            local,
            self.mesh,
            placements,
            run_check=False,
            shape=parameter.shape,
            stride=_strides(tuple(parameter.shape)),
        )


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides)) if shape else ()
