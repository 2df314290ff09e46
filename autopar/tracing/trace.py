"""From a model to its named graph: export, a rule for every op, a name for every dim."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from autopar.errors import AutoparWarning
from autopar.ir.analysis.repeated_layers import repeated_layers
from autopar.ir.graph import NamedGraph
from autopar.rules.proof.discover import Discoveries
from autopar.rules.registry import rule_table
from autopar.tracing.assemble import assemble
from autopar.tracing.export.export import export
from autopar.tracing.naming.bind_graph import bind_graph
from autopar.tracing.naming.name_dims import name_dims
from autopar.tracing.plain_model import check_plain

__all__ = ["named_graph", "trace"]


_DISCOVERIES = Discoveries()
"""Rules found for ops that the table lacks, kept between traces."""


def named_graph(
    model: nn.Module, inputs: tuple[Any, ...] | Mapping[str, Any], dims: Mapping[str, str] | None = None
) -> NamedGraph:
    """The stages in their order; what no rule is found for is warned of."""
    exported = export(model, inputs)
    binding = bind_graph(exported, rule_table(), _DISCOVERIES)
    for reason in dict.fromkeys(bound.reason for bound in binding.nodes if bound.source == "replicated"):
        warnings.warn(reason, AutoparWarning, stacklevel=3)
    repeats = repeated_layers(exported)
    naming = name_dims(model, exported, binding, dims, repeats)
    return assemble(model, exported, binding, naming, repeats)


def trace(
    model: nn.Module, inputs: tuple[Any, ...] | Mapping[str, Any], *, dims: Mapping[str, str] | None = None
) -> NamedGraph:
    """Trace a model: a functional graph of its forward, a rule for every op, a name for every dim.

    `inputs` are example arguments: a tuple of positional or a dict of keyword ones; the model may be on the meta
    device. `dims` names dims of inputs, parameters and buffers by name or pattern:
    `{"input_ids": "batch seq", "layers.*.up_proj.weight": "d_ff d_model"}`.
    """
    check_plain(model)
    return named_graph(model, inputs, dims)
