"""Find values of a graph that may share memory."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch.fx import Node

__all__ = ["FRESH", "is_idle_copy", "makes_new_memory", "readers"]

# Attribute of a module that stands for an op whose results share no memory with its operands.
FRESH = "fresh"


def readers(values: Iterable[Node]) -> set[Node]:
    """Return the ops that read some tensors, also through views; for an op with several results, all of them."""
    found: set[Node] = set()
    open_nodes = list(values)
    while open_nodes:
        for user in open_nodes.pop().users:
            several = bool(user.users) and all(part.target is operator.getitem for part in user.users)
            for reader in user.users if several else (user,):
                if reader not in found:
                    found.add(reader)
                    if _may_alias(user):
                        open_nodes.append(reader)
    return found


def _may_alias(node: Node) -> bool:
    """Return whether the result of an op may share the memory of an operand."""
    if isinstance(node.target, torch._ops.OpOverload):
        return any(result.alias_info is not None for result in node.target._schema.returns)
    return node.op != "output" and not node.meta.get(FRESH)


def makes_new_memory(op: torch._ops.OpOverload) -> bool:
    """Return whether the results of an op never share the memory of an operand; padding by nothing may be a view."""
    shared = any(result.alias_info is not None for result in op._schema.returns)
    return not shared and op is not torch.ops.aten.constant_pad_nd.default


def is_idle_copy(node: Node) -> bool:
    """Return whether an op of a functional graph makes an equal copy (dropout of nothing).

    The graph changes no value, so only a user who changes a result could see the difference.
    """
    if node.target is not torch.ops.aten.clone.default:
        return False
    if node.kwargs.get("memory_format") not in (None, torch.preserve_format):
        return False
    original = node.args[0]
    assert isinstance(original, Node), node
    return not any(reader.op == "output" for reader in readers([original, node]))
