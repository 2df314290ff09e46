"""Trace of a part of a model by itself: its parameters keep the names, and their dims the names, of the whole model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn
from torch.fx import Graph, GraphModule, Node

from autopar.ir.exported import Exported
from autopar.ir.graph import NamedGraph
from autopar.tracing.trace import Exporter, named_graph

__all__ = ["called_at", "named_part", "of_used", "stored_dims"]


@contextmanager
def called_at(model: nn.Module, part: str) -> Iterator[None]:
    """Make a call of a model one of its module `part`, by path; the empty path is the model itself."""
    if not part:
        yield
        return
    module = model.get_submodule(part)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return module(*args, **kwargs)

    forward.__wrapped__ = module.forward  # type: ignore[attr-defined]  # its signature and annotations
    own = vars(model)
    before = {name: own[name] for name in ("forward",) if name in own}
    own["forward"] = forward
    try:
        yield
    finally:
        del own["forward"]
        own.update(before)


def named_part(
    model: nn.Module, inputs: tuple[Any, ...] | Mapping[str, Any], known: Mapping[str, str], export: Exporter
) -> NamedGraph:
    """Trace a model that is `called_at` a part, with the dims of the whole model's parameters and buffers."""
    return named_graph(model, inputs, None, export, known)


def stored_dims(graph: NamedGraph) -> dict[str, str]:
    """Return the dims of parameters and buffers as text, in the form of `dims=`, with the parts of compounds."""
    found = {}
    for tensor in graph.tensors.values():
        if tensor.kind not in ("param", "buffer"):
            continue
        dims = []
        for place in range(len(tensor.shape)):
            names = [atom.names[-1] if atom.names else "" for atom in tensor.atoms if atom.dim == place]
            dims.append("_" if not all(names) else names[0] if len(names) == 1 else f"({' '.join(names)})")
        found[tensor.name] = " ".join(dims)
    return found


def of_used(exported: Exported) -> Exported:
    """Return an export without the parameters, buffers and constants that no node of its graph uses."""
    source = exported.graph_module.graph
    unused = {node.name for node in source.find_nodes(op="placeholder") if not node.users}
    unused -= {one.node for one in exported.placeholders if one.kind == "input"}
    if not unused:
        return exported
    graph, copies = Graph(), dict[Node, Node]()
    for node in source.nodes:
        if node.name not in unused:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    kept = tuple(one for one in exported.placeholders if one.node not in unused)
    names = {one.name for one in kept}
    return replace(
        exported,
        graph_module=GraphModule(exported.graph_module, graph),
        placeholders=kept,
        constants={name: value for name, value in exported.constants.items() if name in names},
        aliases={other: name for other, name in exported.aliases.items() if name in names},
    )
