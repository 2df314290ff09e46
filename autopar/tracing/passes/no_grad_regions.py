"""Replace regions without gradients by `detach` of the values that enter them.

torch.export drops the switches of the grad mode, and gradients come out wrong. Its own pass would make submodules of
the regions, miss those inside autocast and lose the rest in decompositions. The graph that it captures first is flat
and still has the switches. After `detach` no gradient flows back, whatever runs the graph. The switches of autocast
stay: decompositions turn them into casts.

Input::

    set_grad_enabled(False)
    y = relu(h)
    set_grad_enabled(True)
Output::

    d = detach(h)
    y = relu(d)
"""

from __future__ import annotations

from typing import Any

import torch
from torch.export.graph_signature import ExportGraphSignature, InputKind
from torch.fx import Graph, Node

from autopar.tracing.export.refuse import Refusal

aten = torch.ops.aten


def no_grad_regions(graph: Graph, signature: ExportGraphSignature, ambient: bool) -> None:
    """Replace the switches of the grad mode, in place; `ambient` is the grad mode of the whole call."""
    disabled = _remove_switches(graph, ambient)
    differentiable = _differentiable(graph, signature, disabled)
    for node in graph.nodes:
        _check_in_place(node, disabled, differentiable)
    if ambient:
        _detach_entries(graph, disabled, differentiable)


def _remove_switches(graph: Graph, ambient: bool) -> set[Node]:
    """Erase the switches and return the nodes captured with gradients disabled."""
    enabled = ambient
    disabled = set()
    for node in list(graph.nodes):
        if node.target is torch._C._set_grad_enabled:
            enabled = bool(node.args[0])
            if enabled and not ambient:
                raise Refusal(
                    "the forward enables gradients inside a call that runs without them",
                    "trace with gradients enabled (outside torch.no_grad())",
                    node,
                )
            graph.erase_node(node)
        elif node.op == "call_function" and not enabled:
            disabled.add(node)
    return disabled


def _differentiable(graph: Graph, signature: ExportGraphSignature, disabled: set[Node]) -> set[Node]:
    """Return the values through which a gradient may flow to a parameter or an input."""
    placeholders = graph.find_nodes(op="placeholder")
    found = {
        node
        for node, spec in zip(placeholders, signature.input_specs, strict=True)
        if spec.kind in (InputKind.PARAMETER, InputKind.USER_INPUT) and _is_float(node)
    }
    for node in graph.nodes:
        if node.op != "call_function" or node in disabled or node.target is aten.detach.default:
            continue
        if any(source in found for source in node.all_input_nodes) and _is_float(node):
            found.add(node)
    return found


def _is_float(node: Node) -> bool:
    val = node.meta.get("val")
    if isinstance(val, torch.Tensor):
        return val.is_floating_point() or val.is_complex()
    # Of several results the getitems decide.
    return isinstance(val, (tuple, list))


def _detach_entries(graph: Graph, disabled: set[Node], differentiable: set[Node]) -> None:
    detached: dict[Node, Node] = {}
    for node in graph.nodes:
        if node not in disabled:
            continue
        for source in node.all_input_nodes:
            if source in differentiable:
                if source not in detached:
                    with graph.inserting_before(node):
                        detached[source] = graph.call_function(aten.detach.default, (source,))
                    detached[source].meta.update({**node.meta, "val": source.meta["val"]})
                node.replace_input_with(source, detached[source])


def _check_in_place(node: Node, disabled: set[Node], differentiable: set[Node]) -> None:
    """Raise if a node changes a differentiable value in place without recording a gradient."""
    # A functional graph cannot express it: the new value would carry the gradient of the old one.
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not schema.is_mutable:
        return
    writes = [argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments]
    for written, is_write in zip(node.args, writes, strict=False):
        if not is_write or not isinstance(written, Node):
            continue
        base, hidden = written, node in disabled
        while base.op == "call_function" and base.args and _is_view(base):
            hidden = hidden or base.target is aten.detach.default
            source: Any = base.args[0]
            base = source
        if hidden and base in differentiable:
            raise Refusal(
                "a tensor that needs a gradient is changed in place where no gradient is recorded",
                "compute a new tensor instead of changing this one",
                node,
            )


def _is_view(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.returns or schema.returns[0].alias_info is None:
        return False
    return not schema.is_mutable and isinstance(node.args[0], Node)
