"""The pipeline, as functions that read like it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.agreement import Agreement
from autopar.completion import Decisions, complete
from autopar.contracts import check_contracts, check_memory
from autopar.conversions import Inserted, Outputs
from autopar.decided import Plan
from autopar.engine import device_mesh
from autopar.errors import AutoparError, AutoparWarning
from autopar.layout.choosing import choose_layout
from autopar.layout.language import Layout
from autopar.layout.resolve import resolve
from autopar.layout.strategies import strategy_names
from autopar.mesh import Mesh
from autopar.module import ParallelModule, Settings
from autopar.rules.discover import Discoveries
from autopar.rules.registry import rule_table
from autopar.tracing.assemble import assemble
from autopar.tracing.binding import bind_graph
from autopar.tracing.export import export
from autopar.tracing.graph import NamedGraph, NamedTensor
from autopar.tracing.naming import name_dims
from autopar.tracing.regions import repeated_layers

__all__ = ["parallelize", "trace"]

_DISCOVERIES = Discoveries()
"""Rules found for ops that the table lacks, kept between traces."""


def trace(
    model: nn.Module, inputs: tuple[Any, ...] | Mapping[str, Any], *, dims: Mapping[str, str] | None = None
) -> NamedGraph:
    """Trace a model: a functional graph of its forward, a rule for every op, a name for every dim.

    `inputs` are example arguments: a tuple of positional or a dict of keyword ones; the model may be on the meta
    device. `dims` names dims of inputs, parameters and buffers by name or pattern:
    `{"input_ids": "batch seq", "layers.*.up_proj.weight": "d_ff d_model"}`.
    """
    exported = export(model, inputs)
    binding = bind_graph(exported, rule_table(), _DISCOVERIES)
    for reason in dict.fromkeys(bound.reason for bound in binding.nodes if bound.source == "replicated"):
        warnings.warn(reason, AutoparWarning, stacklevel=2)
    repeats = repeated_layers(exported)
    naming = name_dims(model, exported, binding, dims, repeats)
    return assemble(model, exported, binding, naming, repeats)


def parallelize(
    model: nn.Module,
    mesh: str | Mesh | DeviceMesh,
    inputs: tuple[Any, ...] | Mapping[str, Any] | None = None,
    *,
    layout: str | Path | Layout | None = None,
    dims: Mapping[str, str] | None = None,
    outputs: Outputs = "sharded",
    local_inputs: bool = False,
    compute_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> ParallelModule:
    """The model on all devices of the mesh, under a layout: text, a `.lay` file, or the name of a strategy.

    Every process of the mesh calls this with the same model and inputs. The result is called as the model is; its
    parameters are DTensors under the model's names. Without `inputs` it is traced at its first call. `outputs`: tensors
    that are no scalars come back as DTensors (`sharded`), gathered (`full`) or as this rank's plain shards (`local`).
    `local_inputs`: the inputs are this rank's shards already. `compute_dtype`: parameters and inputs are cast to it for
    the forward and backward, while the parameters that the optimizer sees stay as they are; `reduce_dtype`: gradients
    are added up in it, by default in the dtype of their parameter.
    """
    if layout is None:
        raise AutoparError(
            "parallelize needs a layout: it does not search for one\n"
            f"fix: layout='ddp', another strategy ({', '.join(strategy_names())}), a .lay file, or text"
        )
    if outputs not in get_args(Outputs):
        raise AutoparError(f"outputs={outputs!r} is none of {', '.join(map(repr, get_args(Outputs)))}")
    for argument, dtype in (("compute_dtype", compute_dtype), ("reduce_dtype", reduce_dtype)):
        if dtype is not None and not getattr(dtype, "is_floating_point", False):
            raise AutoparError(f"{argument}={dtype!r} is no floating point dtype\nfix: {argument}=torch.bfloat16, say")
    named_axes = mesh if isinstance(mesh, Mesh) else Mesh(mesh)
    devices = mesh if not isinstance(mesh, str | Mesh) else device_mesh(named_axes)
    axes = dict(zip(named_axes.names, named_axes.sizes, strict=True))
    settings = Settings(outputs, local_inputs, compute_dtype, reduce_dtype)
    # A layout file that one rank alone cannot read stops all of them.
    chosen = Agreement(devices).together(lambda: choose_layout(layout, axes))
    stored = next((parameter.dtype for parameter in model.parameters()), None) if compute_dtype is not None else None
    planner = _Planner(chosen, axes, dims, settings, stored, devices.device_type)
    return ParallelModule(model, devices, planner, settings, inputs)


@dataclass(frozen=True)
class _Planner:
    """A call's graph and decisions, under a layout."""

    layout: Layout
    axes: Mapping[str, int]
    dims: Mapping[str, str] | None
    settings: Settings
    stored: torch.dtype | None
    """What the optimizer updates, where that is not what is computed in."""
    device_type: str

    def trace(self, model: nn.Module, inputs: tuple[Any, ...] | Mapping[str, Any]) -> NamedGraph:
        return trace(model, inputs, dims=self.dims)

    def decide(self, graph: NamedGraph) -> Decisions:
        return complete(graph, self.layout, self.axes)

    def check(self, graph: NamedGraph, decisions: Decisions, inserted: tuple[Inserted, ...]) -> None:
        check_contracts(self.layout, graph, decisions, inserted)
        plan = replace(
            Plan.decided(graph, decisions),
            outputs=self.settings.outputs,
            local_inputs=self.settings.local_inputs,
            master_dtype=self.stored,
            gradient_dtype=self.settings.reduce_dtype,
        )
        check_memory(self.layout, graph, plan, self._device_bytes())

    def _device_bytes(self) -> float | None:
        """What a device has; of a CPU, which the ranks of one machine share, that is not known."""
        if self.device_type == "cpu":
            return None
        properties = torch.get_device_module(self.device_type).get_device_properties()
        return float(properties.total_memory)

    def whole_shapes(self, graph: NamedGraph) -> Mapping[str, tuple[int, ...]]:
        return {name: self._whole(graph.tensors[name]) for name in graph.inputs}

    def _whole(self, tensor: NamedTensor) -> tuple[int, ...]:
        """The shape of an input of which one rank has a shard of this shape."""
        # Asked about a tensor that all axes divide: what the shard itself could still be split into does not matter.
        scale = prod(self.axes.values())
        atoms = tuple(replace(atom, size=atom.size * scale if atom.names else atom.size) for atom in tensor.atoms)
        sizes = [prod(atom.size for atom in atoms if atom.dim == dim) for dim in range(len(tensor.shape))]
        wanted = resolve(self.layout, replace(tensor, atoms=atoms, shape=tuple(sizes)), "input", self.axes)
        shape = list(tensor.shape)
        for atom, axes in zip(atoms, wanted, strict=True):
            shape[atom.dim] *= prod(self.axes[axis] for axis in axes or ())
        return tuple(shape)

    def facts(self) -> Mapping[str, str]:
        lines = enumerate(str(self.layout).splitlines(), start=1)
        found = {f"line {number} of the layout": line for number, line in lines}
        return {**found, "dims": str(dict(self.dims or {})), "mesh": str(dict(self.axes))}
