"""Trace a model: export it, bind a rule to every op, name every dim, assemble the `NamedGraph`."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.fx import Node

from autopar.errors import AutoparError, AutoparWarning
from autopar.ir.analysis.op_memory import differentiable
from autopar.ir.analysis.repeated_layers import RepeatedLayers, repeated_layers
from autopar.ir.exported import Exported, NodeOrigin
from autopar.ir.graph import NamedGraph
from autopar.ir.invariants import verifying
from autopar.ir.precision import Precision, parse_precision
from autopar.ir.values import ROUTED, SLOTTED, Atom, Dim, Kind, NamedNode, NamedTensor
from autopar.ir.verify import verify_graph
from autopar.rules.bind_call import factor_sizes
from autopar.rules.proof.discover import Discoveries
from autopar.rules.registry import rule_table
from autopar.tracing.export.export import export
from autopar.tracing.naming.bind_graph import BoundGraph, BoundNode, ValueKey, bind_graph
from autopar.tracing.naming.name_dims import DimNames, name_dims
from autopar.tracing.passes.read_masks import ATTENTION_NOTE
from autopar.tracing.skeleton import in_precision

# Rules discovered for ops without a rule in the table. A discovery runs the op many times, so traces share them.
DISCOVERIES = Discoveries()

# Gives the export of a call: a new one, or one that shares the work of calls of other sizes (`sized_exports`).
Exporter = Callable[[nn.Module, tuple[Any, ...] | Mapping[str, Any]], Exported]


def trace(
    model: nn.Module,
    inputs: tuple[Any, ...] | Mapping[str, Any],
    *,
    dims: Mapping[str, str] | None = None,
    precision: str | Precision | None = None,
) -> NamedGraph:
    """Trace a model into a functional graph of its forward, with a rule for every op and a name for every dim.

    Parameters:
        model: any module that is not parallel yet; it may be on the meta device.
        inputs: example arguments: a tuple of positional ones or a dict of keyword ones.
        dims: names for dims of inputs, parameters and buffers, by name or pattern:
            `{"input_ids": "batch seq", "layers.*.up_proj.weight": "d_ff d_model"}`.
        precision: floats compute in its dtype, as in `autopar.plan`; by default in those of the model.

    Returns:
        The graph, which prints as a listing of its ops.

    >>> import autopar, torch
    >>> graph = autopar.trace(torch.nn.Linear(4, 2), (torch.ones(8, 4),))
    >>> [(tensor.name, tensor.shape) for tensor in graph.parameters]
    [('weight', (2, 4)), ('bias', (2,))]
    """
    check_plain(model)
    return named_graph(*in_precision(model, inputs, parse_precision(precision)), dims)


def named_graph(
    model: nn.Module,
    inputs: tuple[Any, ...] | Mapping[str, Any],
    dims: Mapping[str, str] | None = None,
    export: Exporter = export,
    known: Mapping[str, str] | None = None,
) -> NamedGraph:
    """Run the stages of a trace in order; warn about ops without a rule.

    `known` has names that dims have in another graph of the model. They hold where they fit.
    """
    exported = export(model, inputs)
    binding = bind_graph(exported, rule_table(), DISCOVERIES)
    for reason in dict.fromkeys(bound.reason for bound in binding.nodes if bound.source == "replicated"):
        warnings.warn(reason, AutoparWarning, stacklevel=3)
    repeats = repeated_layers(exported)
    naming = name_dims(model, exported, binding, dims, repeats, known)
    graph = replace(assemble(model, exported, binding, naming, repeats), given=dims or {})
    if verifying():
        verify_graph(graph)
    return graph


# -- models that are parallel already ---------------------------------------------------------------------------------


class AlreadyParallel(nn.Module):
    """Base class of the parallel modules that autopar returns."""


def check_plain(model: nn.Module) -> None:
    """Raise if a model, or a part of it, is parallel already."""
    # Tensors of a parallel model are shards, which a trace would take for whole tensors.
    for name, module in model.named_modules():
        where = f" (its {name})" if name else ""
        if isinstance(module, AlreadyParallel):
            raise AutoparError(
                f"{type(model).__name__}{where} is a parallel module already\n"
                "fix: parallelize the model itself, once; another layout needs the model again"
            )
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            raise AutoparError(
                f"{type(model).__name__}{where} is wrapped in {type(module).__name__}, which also reduces gradients\n"
                'fix: give the model inside, model.module; layout="ddp" does what the wrapper does'
            )
    for name, parameter in nn.Module.named_parameters(model):
        if isinstance(parameter, DTensor):
            raise AutoparError(
                f"the parameter {name} is a DTensor, made by fully_shard or parallelize_module\n"
                'fix: give the model without them; layout="fsdp" does what fully_shard does'
            )


# -- the named graph --------------------------------------------------------------------------------------------------


def assemble(
    model: nn.Module, exported: Exported, binding: BoundGraph, naming: DimNames, repeats: tuple[RepeatedLayers, ...]
) -> NamedGraph:
    """Return the graph with values, ops and dims under their names."""
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
    """Return the name of each value: `<module path>/<op>`, with `.1`, `.2` for repeated ops of a module."""
    names = {p.node: p.name for p in exported.placeholders}
    counts: dict[str, int] = defaultdict(int)
    for bound in binding.nodes:
        origin: NodeOrigin = bound.node.meta["origin"]
        stem = f"{origin.module_path}/{bound.call.op.split('.')[1].strip('_')}"
        counts[stem] += 1
        name = stem if counts[stem] == 1 else f"{stem}.{counts[stem] - 1}"
        for i, key in enumerate(bound.outputs):
            if key is not None:
                names[key] = name if len(bound.outputs) == 1 else f"{name}:{i}"
    return names


def _tensors(
    exported: Exported, binding: BoundGraph, naming: DimNames, names: dict[ValueKey, str]
) -> list[NamedTensor]:
    kinds: dict[ValueKey, Kind] = {p.node: p.kind for p in exported.placeholders}
    with_gradient = {node.name for node in differentiable(exported)}
    frozen = {p.node for p in exported.placeholders if p.kind == "param" and not p.requires_grad}
    tensors = []
    for node in exported.graph_module.graph.nodes:
        if node.name in binding.dims:
            value = node.meta["val"]
            atoms = tuple(_atoms(binding.dims[node.name], naming))
            tensors.append(
                NamedTensor(
                    name=names[node.name],
                    kind=kinds.get(node.name, "activation"),
                    dims=tuple(naming.show(dim) for dim in binding.dims[node.name]),
                    shape=tuple(value.shape),
                    dtype=value.dtype,
                    node=node.name,
                    atoms=atoms,
                    requires_grad=node.name in with_gradient,
                    frozen=node.name in frozen,
                    routed=_leading(atoms, node.meta.get(ROUTED, 0)),
                    slotted=_leading(atoms, node.meta.get(SLOTTED, 0)),
                )
            )
    return tensors


def _atoms(dims: Iterable[int], naming: DimNames) -> Iterator[Atom]:
    """Yield the atoms of a tensor's dims, with the names of the compounds around each."""
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


def _leading(atoms: tuple[Atom, ...], groups: int) -> int:
    """Return the number of leading atoms that are the groups of rows."""
    count = 0
    while groups > 1:
        assert count < len(atoms), f"no {groups} groups in {atoms}"
        groups //= max(atoms[count].size, 1)
        count += 1
    return count


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
        routed=_groups_of(bound.node),
        fixed=frozenset(
            (factor, i)
            for factor, dim in bound.factors.items()
            for i, atom in enumerate(naming.binding.space.atoms(dim))
            if atom in naming.fold_pieces
        ),
    )


def _groups_of(node: Node) -> int:
    """Return the number of groups of the routed rows that an op takes or gives; 0 without."""
    found: list[int] = [one.meta[ROUTED] for one in (node, *node.all_input_nodes) if ROUTED in one.meta]
    return max(found, default=0)


def _dims(binding: BoundGraph, naming: DimNames) -> dict[str, Dim]:
    """Return the named dims: those of the user and of detectors, then generated ones, each by use."""
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
