"""Reading and writing nodes of a graph that was exported: arguments by name, new nodes with the values they have."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node

__all__ = ["arguments_of", "insert", "replaced"]


# Annotations of users on a value.
MARKS = ("named", "constrain")


def arguments_of(node: Node) -> dict[str, Any]:
    """All arguments of a call, those that are left out as well."""
    assert isinstance(node.target, torch._ops.OpOverload), node
    named = {argument.name: argument.default_value for argument in node.target._schema.arguments}
    named.update(zip(named, node.args, strict=False))
    named.update(node.kwargs)
    return named


def insert(origin: Node, op: Any, *args: Any, before: Node | None = None, **kwargs: Any) -> Node:
    """A node before `origin`, which it stands in for a part of: from the same place in the model, and with a value."""
    with origin.graph.inserting_before(before or origin):
        made = origin.graph.call_function(op, args, kwargs)
    made.meta.update({key: value for key, value in origin.meta.items() if key not in MARKS})
    values, named = torch.fx.node.map_arg((args, kwargs), lambda node: node.meta["val"])
    mode = next(v.fake_mode for v in _flat(origin.meta["val"]) if isinstance(v, FakeTensor))
    with mode, torch.no_grad():
        made.meta["val"] = op(*values, **named)
    return made


def replaced(node: Node, by: Node) -> None:
    """Put one node in the place of another; what users say of that one they say of this."""
    by.meta.update({key: node.meta[key] for key in MARKS if key in node.meta})
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)


def _flat(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)
