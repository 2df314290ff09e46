"""The pipeline, as functions that read like it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from autopar.rules.registry import rule_table
from autopar.trace.assemble import assemble
from autopar.trace.binding import bind_graph
from autopar.trace.export import export
from autopar.trace.graph import NamedGraph
from autopar.trace.naming import name_dims
from autopar.trace.regions import repeated_layers

__all__ = ["trace"]


def trace(
    model: nn.Module, inputs: tuple[Any, ...] | Mapping[str, Any], *, dims: Mapping[str, str] | None = None
) -> NamedGraph:
    """Trace a model: a functional graph of its forward, a rule for every op, a name for every dim.

    `inputs` are example arguments: a tuple of positional or a dict of keyword ones; the model may be on the meta
    device. `dims` names dims of inputs, parameters and buffers by name or pattern:
    `{"input_ids": "batch seq", "layers.*.up_proj.weight": "d_ff d_model"}`.
    """
    exported = export(model, inputs)
    binding = bind_graph(exported, rule_table())
    repeats = repeated_layers(exported)
    naming = name_dims(model, exported, binding, dims, repeats)
    return assemble(model, exported, binding, naming, repeats)
