"""Text of everything that determines the results of a traced graph; ranks compare it before they run it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from autopar.ir.graph import NamedGraph
from autopar.lowering.collectives.checksum import checksum, kind_of
from autopar.runtime.compiled_call import outline
from autopar.tracing.export.autograd_functions import plain_arguments

__all__ = ["graph_facts"]


def graph_facts(graph: NamedGraph) -> dict[str, str]:
    """Return a line for each op, rule and tensor of the graph, with constants by their checksums."""
    exported = graph.exported
    facts = {}
    nodes = {node.name: node for node in exported.graph_module.graph.nodes}
    # Constants first: the first difference is reported, and a constant says more than the op that reads it.
    for tensor in graph.tensors.values():
        if tensor.kind == "constant":
            facts[f"constant {tensor.name}, read by {_reader(nodes[tensor.node])}"] = _value(
                exported.constants[tensor.name]
            )
    for node in nodes.values():
        if node.op == "get_attr":
            facts[f"op {_place(node)}"] = _attribute(exported.graph_module, str(node.target))
        elif node.op != "placeholder":
            facts[f"op {_place(node)}"] = f"{_target(node.target)}({_arguments(node)})"
    for named in graph.nodes:
        facts[f"rule of {named.name}"] = f"{named.rule} of {', '.join(map(str, named.operands))}"
    for tensor in graph.tensors.values():
        gradient = " with gradient" if tensor.requires_grad else ""
        facts[f"{tensor.kind} {tensor.name}"] = f"{tensor} {tensor.dtype} {list(tensor.shape)}{gradient}"
    facts["results of the model"] = outline(exported.output_tree.node)
    facts["changes in place"] = str(exported.mutations)
    return facts


def _reader(node: Node) -> str:
    """Return the first op of the user's code that reads a value, directly or through copies."""
    # Breadth first; the list grows while it is read.
    seen = [node]
    for reached in seen:
        origin = reached.meta.get("origin")
        if reached is not node and origin is not None and origin.source:
            return _place(reached)
        seen += [user for user in reached.users if user not in seen]
    return "nothing"


def _place(node: Node) -> str:
    origin = node.meta.get("origin")
    return f"{node.name} at {origin.source}" if origin is not None and origin.source else node.name


def _target(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target) + plain_arguments(target)
    return getattr(target, "__qualname__", str(target))


def _arguments(node: Node) -> str:
    named = (f"{name}={_text(value)}" for name, value in node.kwargs.items())
    return ", ".join([*map(_text, node.args), *named])


def _text(value: Any) -> str:
    if isinstance(value, Node):
        return value.name
    if isinstance(value, torch.device):  # each rank has a device of its own
        return value.type
    if isinstance(value, Tensor):
        return _value(value)
    if isinstance(value, Mapping):
        return f"{{{_joined(f'{name}={_text(item)}' for name, item in value.items())}}}"
    if isinstance(value, tuple | list):
        return f"[{_joined(map(_text, value))}]"
    return repr(value)


def _joined(texts: Iterable[str]) -> str:
    return ", ".join(texts)


def _value(tensor: Tensor) -> str:
    """Return the checksum of a tensor, and its values if there are at most four."""
    if tensor.is_meta:
        return kind_of(tensor)
    shown = f" {tensor.tolist()}" if tensor.numel() <= 4 else ""
    return f"{kind_of(tensor)}{shown} with checksum {checksum(tensor)}"


def _attribute(module: nn.Module, path: str) -> str:
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name)
    if isinstance(found, Tensor):
        return _value(found)
    # Subgraphs of higher-order ops are listed op by op; other modules count by their type.
    if not isinstance(found, torch.fx.GraphModule):
        return type(found).__qualname__
    lines = [f"{_target(node.target)}({_arguments(node)})" for node in found.graph.nodes if node.op != "get_attr"]
    lines += [_attribute(found, str(node.target)) for node in found.graph.find_nodes(op="get_attr")]
    return "; ".join(lines)
