"""Dispatch the rows of tokens without a copy of each for each of its experts.

    wide = reshape(clone(expand(unsqueeze(x, 1), [T, 2, d])), [2 * T, d])    # reads every row twice, and writes them
    rows = dispatch(wide, order, inverse)                                    # reads and writes them again

becomes `rows = dispatch(x, order, inverse)`, which takes row `order // 2`. Its gradient is summed as before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node

from autopar.lowering.modules.routed_ops import DispatchRows
from autopar.lowering.passes.recompute_regions import KEPT, REGION
from autopar.rules.call import arguments_by_name

__all__ = ["dispatch_repeated_rows"]

aten = torch.ops.aten


def dispatch_repeated_rows(graph: Graph, modules: Mapping[str, nn.Module]) -> None:
    """Let dispatches take rows from the tensor without repeats, in place."""
    for node in graph.find_nodes(op="call_module"):
        module = modules.get(str(node.target))
        if not isinstance(module, DispatchRows):
            continue
        found = _repeats(node.args[0], node)
        if found is None:
            continue
        module.repeats = found.times
        node.args = (found.source, *node.args[1:])
        for one in found.nodes:
            graph.erase_node(one)


@dataclass(frozen=True)
class _RepeatedRows:
    """A tensor of rows, how often each stands in another one, and the nodes that make that one, last first."""

    source: Node
    times: int
    nodes: tuple[Node, ...]


def _repeats(wide: Any, reader: Node) -> _RepeatedRows | None:
    """Return the repeats of rows that nothing else reads; else None."""
    if _is_step(wide, aten.repeat_interleave.self_int, reader):
        given = arguments_by_name(wide.target, wide.args, wide.kwargs)
        return _RepeatedRows(given["self"], given["repeats"], (wide,)) if given["dim"] == 0 else None
    nodes: list[Node] = []
    for target in (aten.reshape.default, aten.clone.default, aten.expand.default, aten.unsqueeze.default):
        if _is_step(wide, target, reader):
            nodes.append(wide)
            wide = wide.args[0]
        elif target is not aten.clone.default:
            return None
    wider, rows = nodes[-2].meta["local_shape"], nodes[0].meta["local_shape"]
    if nodes[-1].args[1] != 1 or len(wider) != 3 or rows != (wider[0] * wider[1], wider[2]):
        return None
    return _RepeatedRows(wide, wider[1], tuple(nodes))


def _is_step(node: Any, target: Any, reader: Node) -> bool:
    """Return whether a node calls the target, has one user, and is kept or recomputed as the reader is."""
    if not isinstance(node, Node) or node.target is not target or len(node.users) != 1:
        return False
    return all(node.meta.get(name) == reader.meta.get(name) for name in (REGION, KEPT))
