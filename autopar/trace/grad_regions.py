"""Regions without gradients: `run_decompositions({})` drops them, and gradients come out wrong.

torch.export leaves a region as a call of a submodule. We put its nodes back in line (which also keeps their module
path and source line) and detach what enters it: then no gradient flows back, whatever runs the graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

__all__ = ["detach_no_grad_regions", "inline_regions"]

_SET_GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled
_AUTOCAST = torch.ops.higher_order.wrap_with_autocast
_enter_autocast = torch.amp.autocast_mode._enter_autocast
_exit_autocast = torch.amp.autocast_mode._exit_autocast


def inline_regions(graph_module: GraphModule) -> None:
    """Replace the calls of grad-mode and autocast regions by their nodes; `meta["grad"]` says the grad mode if set."""
    graph = graph_module.graph
    for node in list(graph.nodes):
        if node.target is _SET_GRAD:
            enabled, body, *args = node.args
            _inline(graph, node, graph_module, body, args, enabled)
        elif node.target is _AUTOCAST:
            device, dtype, enabled, cache, body, *args = node.args
            with graph.inserting_before(node):
                entry = graph.call_function(_enter_autocast, (device, dtype, enabled, cache))
            _inline(graph, node, graph_module, body, args, None, entry)
    for node in graph.find_nodes(op="get_attr"):
        if not node.users:
            graph.erase_node(node)


def _inline(
    graph: Graph,
    call: Node,
    owner: GraphModule,
    body: Any,
    args: list[Any],
    grad: bool | None,
    autocast_entry: Node | None = None,
) -> None:
    module = owner.get_submodule(body.target)
    assert isinstance(module, GraphModule), "a region is a graph"
    inline_regions(module)
    values: dict[Node, Any] = dict(zip(module.graph.find_nodes(op="placeholder"), args, strict=True))
    results: Any = ()
    with graph.inserting_before(call):
        for node in module.graph.nodes:
            if node.op == "output":
                results = torch.fx.node.map_arg(node.args[0], values.__getitem__)
            elif node.op != "placeholder":
                copied = graph.node_copy(node, values.__getitem__)
                values[node] = copied
                if grad is not None:
                    copied.meta.setdefault("grad", grad)
        if autocast_entry is not None:
            graph.call_function(_exit_autocast, (autocast_entry,))
    for user in list(call.users):
        assert user.target.__name__ == "getitem", "a region returns a tuple"  # type: ignore[union-attr]
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(call)


def detach_no_grad_regions(graph_module: GraphModule) -> None:
    """Detach every tensor that enters a region without gradients."""
    graph = graph_module.graph
    detached: dict[Node, Node] = {}
    for node in list(graph.nodes):
        if node.meta.get("grad", True):
            continue
        for source in node.all_input_nodes:
            if not source.meta.get("grad", True) or not isinstance(source.meta.get("val"), torch.Tensor):
                continue
            if source not in detached:
                with graph.inserting_before(node):
                    copied = graph.call_function(torch.ops.aten.detach.default, (source,))
                copied.meta.update({k: v for k, v in node.meta.items() if k != "val"}, val=source.meta["val"])
                detached[source] = copied
            node.replace_input_with(source, detached[source])
