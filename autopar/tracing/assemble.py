"""The last step of a trace: values, ops and dims under their names, as a `NamedGraph`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from autopar.ir.analysis.op_memory import differentiable
from autopar.ir.analysis.repeated_layers import RepeatedLayers
from autopar.ir.exported import Exported, NodeOrigin
from autopar.ir.graph import NamedGraph
from autopar.ir.values import Atom, Dim, Kind, NamedNode, NamedTensor
from autopar.rules.bind_call import factor_sizes
from autopar.tracing.naming.bind_graph import BoundGraph, BoundNode, ValueKey
from autopar.tracing.naming.name_dims import DimNames
from autopar.tracing.passes.read_masks import ATTENTION_NOTE

__all__ = ["assemble"]


def assemble(
    model: nn.Module, exported: Exported, binding: BoundGraph, naming: DimNames, repeats: tuple[RepeatedLayers, ...]
) -> NamedGraph:
    """Put the pieces of a trace together."""
    names = _value_names(exported, binding)
    results = exported.graph_module.graph.output_node().args[0]
    assert isinstance(results, tuple), "the graph returns a flat tuple"
    return NamedGraph(
        model=model,
        exported=exported,
        tensors={tensor.name: tensor for tensor in _tensors(exported, binding, naming, names)},
        nodes=tuple(_node(bound, names, naming) for bound in binding.nodes),
        inputs=tuple(p.name for p in exported.placeholders if p.kind == "input"),
        outputs=tuple(names[n.name] for n in results[len(exported.mutations) :] if isinstance(n, torch.fx.Node)),
        dims=_dims(binding, naming),
        repeats=repeats,
    )


def _value_names(exported: Exported, binding: BoundGraph) -> dict[ValueKey, str]:
    """Name of each value: `<module path>/<op>`, then `.1`, `.2` for later ones of that op in that module."""
    names = {p.node: p.name for p in exported.placeholders}
    counts: dict[str, int] = defaultdict(int)
    for bound in binding.nodes:
        name = _node_name(bound, counts)
        for i, key in enumerate(bound.outputs):
            if key is not None:
                names[key] = name if len(bound.outputs) == 1 else f"{name}:{i}"
    return names


def _node_name(bound: BoundNode, counts: dict[str, int]) -> str:
    origin: NodeOrigin = bound.node.meta["origin"]
    stem = f"{origin.module_path}/{bound.call.op.split('.')[1].strip('_')}"
    counts[stem] += 1
    return stem if counts[stem] == 1 else f"{stem}.{counts[stem] - 1}"


def _tensors(
    exported: Exported, binding: BoundGraph, naming: DimNames, names: dict[ValueKey, str]
) -> list[NamedTensor]:
    kinds: dict[ValueKey, Kind] = {p.node: p.kind for p in exported.placeholders}
    followed = {node.name for node in differentiable(exported)}
    tensors = []
    for node in exported.graph_module.graph.nodes:
        if node.name in binding.dims:
            dims = tuple(naming.show(dim) for dim in binding.dims[node.name])
            value = node.meta["val"]
            tensors.append(
                NamedTensor(
                    name=names[node.name],
                    kind=kinds.get(node.name, "activation"),
                    dims=dims,
                    shape=tuple(value.shape),
                    dtype=value.dtype,
                    node=node.name,
                    atoms=tuple(_atoms(binding.dims[node.name], naming)),
                    requires_grad=node.name in followed,
                )
            )
    return tensors


def _atoms(dims: Iterable[int], naming: DimNames) -> Iterator[Atom]:
    space = naming.binding.space

    def within(position: int, dim: int, outer: tuple[str, ...]) -> Iterator[Atom]:
        root = space.find(dim)
        names = (*outer, naming.names[root]) if root in naming.names else outer
        parts = space.parts(root)
        if not parts:
            yield Atom(position, space.size(root), names)
        for part in parts:
            yield from within(position, part, names)

    for position, dim in enumerate(dims):
        yield from within(position, dim, ())


def _node(bound: BoundNode, names: dict[ValueKey, str], naming: DimNames) -> NamedNode:
    outputs = tuple(None if key is None else names[key] for key in bound.outputs)
    first = next((name for name in outputs if name is not None), bound.node.name)
    return NamedNode(
        name=first.rpartition(":")[0] if len(outputs) > 1 else first,
        op=bound.call.op,
        operands=tuple(None if key is None else names[key] for key in bound.operands),
        outputs=outputs,
        rule=bound.rule,
        source=bound.source,
        reason=bound.reason,
        factors={factor: naming.show(dim) for factor, dim in bound.factors.items()},
        sizes=factor_sizes(bound.rule, bound.call),
        atoms={
            factor: tuple(map(naming.binding.space.size, naming.binding.space.atoms(dim)))
            for factor, dim in bound.factors.items()
        },
        origin=bound.node.meta["origin"],
        node=bound.node.name,
        attention=bound.node.meta.get(ATTENTION_NOTE),
    )


def _dims(binding: BoundGraph, naming: DimNames) -> dict[str, Dim]:
    """The named dims: the user's and the standard ones first, then the generated ones."""
    sizes: dict[str, set[int]] = defaultdict(set)
    tensors: dict[str, set[int]] = defaultdict(set)
    parts: dict[str, tuple[str, ...]] = {}
    sources: dict[str, str] = {}
    for dim, name in naming.names.items():
        sizes[name].add(binding.space.size(dim))
        tensors[name] |= binding.space.tensors(dim)
        parts.setdefault(name, tuple(naming.show(part) for part in binding.space.parts(dim)))
        sources.setdefault(name, naming.sources[dim])
    ordered = sorted(sizes, key=lambda name: (sources[name] == "generated", -len(tensors[name])))
    return {
        name: Dim(name, tuple(sorted(sizes[name], reverse=True)), parts[name], sources[name], len(tensors[name]))
        for name in ordered
    }
