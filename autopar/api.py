"""The pipeline, as functions that read like it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.completion import complete
from autopar.contracts import check_contracts
from autopar.engine import device_mesh
from autopar.errors import AutoparWarning
from autopar.layout.choosing import choose_layout
from autopar.layout.language import Layout
from autopar.mesh import Mesh
from autopar.module import ParallelModule
from autopar.rewrite.emit import Outputs
from autopar.rules.discover import Discoveries
from autopar.rules.registry import rule_table
from autopar.tracing.assemble import assemble
from autopar.tracing.binding import bind_graph
from autopar.tracing.export import export
from autopar.tracing.graph import NamedGraph
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
    inputs: tuple[Any, ...] | Mapping[str, Any],
    *,
    layout: str | Path | Layout,
    dims: Mapping[str, str] | None = None,
    outputs: Outputs = "sharded",
    local_inputs: bool = False,
) -> ParallelModule:
    """The model on all devices of the mesh, under a layout: text, a `.lay` file, or the name of a strategy.

    Every process of the mesh calls this with the same model and inputs. The result is called as the model is; its
    parameters are DTensors under the model's names.
    """
    named_axes = mesh if isinstance(mesh, Mesh) else Mesh(mesh)
    axes = {axis: size for axis, size in named_axes.axes.items() if size is not None}
    graph = trace(model, inputs, dims=dims)
    text = choose_layout(layout, axes)
    decisions = complete(graph, text, axes)
    devices = device_mesh(named_axes) if isinstance(mesh, str | Mesh) else mesh
    module = ParallelModule(graph, decisions, devices, outputs, local_inputs)
    check_contracts(text, graph, decisions, module.emitted.inserted)
    return module
