"""The invariants of a named graph, checked at the end of tracing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from math import prod

import torch
from torch.fx import Node

from autopar.ir.graph import NamedGraph
from autopar.ir.invariants import Invariant, check_invariants
from autopar.ir.values import NamedNode, NamedTensor
from autopar.rules.call import arguments_by_name, operands_of
from autopar.rules.notation import FactorKind, Operand

__all__ = ["GRAPH_INVARIANTS", "verify_graph"]


def verify_graph(graph: NamedGraph) -> None:
    """Raise `InvariantError` if a named graph breaks one of `GRAPH_INVARIANTS`."""
    check_invariants("the named graph", GRAPH_INVARIANTS, graph)


def _repeated(names: Iterable[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


def _names_that_repeat(graph: NamedGraph) -> Iterator[str]:
    for name, tensor in graph.tensors.items():
        if tensor.name != name:
            yield f"the tensor {tensor.name} stands under {name}"
    yield from (f"two ops are named {name}" for name in _repeated(node.name for node in graph.nodes))
    yield from (f"two ops stand for {name}" for name in _repeated(node.node for node in graph.nodes))
    yield from (f"two tensors stand for {name}" for name in _repeated(one.node for one in graph.tensors.values()))


def _missing_tensors(graph: NamedGraph) -> Iterator[str]:
    named = {f"the op {node.name}": (*node.operands, *node.outputs) for node in graph.nodes}
    named |= {"the inputs": graph.inputs, "the outputs": graph.outputs}
    for place, names in named.items():
        yield from (f"{place}: no tensor is named {name}" for name in names if name and name not in graph.tensors)


def _producers(graph: NamedGraph) -> Iterator[str]:
    counts = Counter(name for node in graph.nodes for name in node.outputs if name is not None)
    for tensor in graph.tensors.values():
        expected = int(tensor.kind == "activation")
        if counts[tensor.name] != expected:
            yield f"{tensor.kind} {tensor.name} is the result of {counts[tensor.name]} ops, expected {expected}"


def _used_too_early(graph: NamedGraph) -> Iterator[str]:
    known = {name for name, tensor in graph.tensors.items() if tensor.kind != "activation"}
    for node in graph.nodes:
        yield from (f"{node.name} reads {name}" for name in node.operands if name is not None and name not in known)
        known.update(name for name in node.outputs if name is not None)


def _wrong_shapes(graph: NamedGraph) -> Iterator[str]:
    for tensor in graph.tensors.values():
        places = [atom.dim for atom in tensor.atoms]
        sizes = tuple(prod(atom.size for atom in tensor.atoms if atom.dim == i) for i in range(len(tensor.shape)))
        if places != sorted(places) or set(places) != set(range(len(tensor.shape))) or sizes != tensor.shape:
            yield f"{tensor}: atoms {[(atom.dim, atom.size) for atom in tensor.atoms]} of shape {list(tensor.shape)}"
        elif len(tensor.dims) != len(tensor.shape):
            yield f"{tensor}: {len(tensor.dims)} names for {len(tensor.shape)} dims"


def _unknown_dims(graph: NamedGraph) -> Iterator[str]:
    for tensor in graph.tensors.values():
        names = {name for dim in tensor.dims for name in re.findall(r"[^\s()]+", dim)} - {"1", "..."}
        names |= {name for atom in tensor.atoms for name in atom.names}
        yield from (f"{tensor}: no dim is named {name}" for name in sorted(names - graph.dims.keys()))


def _wrong_gradients(graph: NamedGraph) -> Iterator[str]:
    for tensor in graph.tensors.values():
        if tensor.requires_grad and not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
            yield f"{tensor} of {tensor.dtype} requires a gradient"


def _traced(graph: NamedGraph) -> dict[str, Node]:
    return {node.name: node for node in graph.exported.graph_module.graph.nodes}


def _values_unlike_traced(graph: NamedGraph) -> Iterator[str]:
    traced = _traced(graph)
    for tensor in graph.tensors.values():
        value = traced[tensor.node].meta["val"] if tensor.node in traced else None
        if value is None:
            yield f"{tensor}: the traced graph has no {tensor.node}"
        elif (tuple(value.shape), value.dtype) != (tensor.shape, tensor.dtype):
            yield f"{tensor} is {tensor.dtype} {list(tensor.shape)}, traced as {value.dtype} {list(value.shape)}"


def _ops_unlike_traced(graph: NamedGraph) -> Iterator[str]:
    traced = _traced(graph)
    order = {name: place for place, name in enumerate(traced)}
    last = -1
    for node in graph.nodes:
        found = traced.get(node.node)
        if found is None or str(found.target) != node.op:
            yield f"{node.name} ({node.op}) stands for {None if found is None else found.target}"
            continue
        if order[node.node] < last:
            yield f"{node.name} stands after ops that follow it in the traced graph"
        last = order[node.node]
        assert isinstance(found.target, torch._ops.OpOverload), found
        given = operands_of(found.target, arguments_by_name(found.target, found.args, found.kwargs))
        wanted = [one.name if isinstance(one, Node) else None for one in given]
        named = [None if name is None else graph.tensors[name].node for name in node.operands]
        if named != wanted:
            yield f"{node.name} takes {named}, traced as {wanted}"


def _pairs(graph: NamedGraph, node: NamedNode) -> Iterator[tuple[Operand, NamedTensor, bool]]:
    """Yield each operand and result of the rule with its tensor, and whether it is a result."""
    for sides, names, is_result in (
        (node.rule.operands, node.operands, False),
        (node.rule.outputs, node.outputs, True),
    ):
        for operand, name in zip(sides, names, strict=False):
            if operand is not None and name is not None:
                yield operand, graph.tensors[name], is_result


def _misfits(graph: NamedGraph) -> Iterator[str]:
    for node in graph.nodes:
        if len(node.rule.outputs) != len(node.outputs):
            yield f"{node.name} has {len(node.outputs)} results, its rule {len(node.rule.outputs)}"
        for name in node.operands[len(node.rule.operands) :]:
            if name is not None and graph.tensors[name].shape:
                yield f"{node.name}: the rule has no operand for {graph.tensors[name]}"
        for operand, tensor, _ in _pairs(graph, node):
            if len(operand.terms) != len(tensor.shape):
                yield f"{node.name}: the rule has {len(operand.terms)} dims for {tensor}"


def _unequal_factors(graph: NamedGraph) -> Iterator[str]:
    for node in graph.nodes:
        missing = [factor for factor in node.rule.factors if factor not in node.sizes or factor not in node.atoms]
        if missing:
            yield f"{node.name}: no extent for {', '.join(missing)}"
            continue
        for operand, tensor, is_result in _pairs(graph, node):
            for term, size in zip(operand.terms, tensor.shape, strict=True):
                windows = any(node.rule.kinds[factor] is FactorKind.HALO for factor in term)
                if windows and not is_result:
                    continue  # a window reads more than one position: the extent is the result's
                if prod(node.sizes[factor] for factor in term) != size:
                    extents = {factor: node.sizes[factor] for factor in term}
                    yield f"{node.name}: a dim of {tensor} has {size}, its factors {extents}"


def _factor_atoms(graph: NamedGraph) -> Iterator[str]:
    for node in graph.nodes:
        for factor, sizes in node.atoms.items():
            if node.rule.kinds[factor] is not FactorKind.HALO and prod(sizes) != node.sizes[factor]:
                yield f"{node.name}: the atoms {sizes} of factor {factor} of extent {node.sizes[factor]}"


def _wrong_placeholders(graph: NamedGraph) -> Iterator[str]:
    placeholders = graph.exported.placeholders
    traced = [node.name for node in graph.exported.graph_module.graph.find_nodes(op="placeholder")]
    if [one.node for one in placeholders] != traced:
        yield f"the traced graph takes {traced}, described as {[one.node for one in placeholders]}"
    for one in placeholders:
        tensor = graph.tensors.get(one.name)
        if tensor is None or (tensor.kind, tensor.node) != (one.kind, one.node):
            yield f"the {one.kind} {one.name} is {tensor and tensor.kind} {tensor}"
    inputs = tuple(one.name for one in placeholders if one.kind == "input")
    if graph.inputs != inputs:
        yield f"the inputs are {graph.inputs}, traced as {inputs}"


def _wrong_results(graph: NamedGraph) -> Iterator[str]:
    flat = graph.exported.graph_module.graph.output_node().args[0]
    by_node = {tensor.node: tensor.name for tensor in graph.tensors.values()}
    if not isinstance(flat, tuple):
        yield "the traced graph returns no flat tuple"
        return
    names = [by_node.get(one.name) if isinstance(one, Node) else None for one in flat]
    count = len(graph.exported.mutations)
    outputs = tuple(name for name in names[count:] if name is not None)
    if graph.outputs != outputs:
        yield f"the outputs are {graph.outputs}, traced as {outputs}"


def _wrong_mutations(graph: NamedGraph) -> Iterator[str]:
    flat = graph.exported.graph_module.graph.output_node().args[0]
    assert isinstance(flat, tuple), "checked before"
    by_node = {tensor.node: tensor for tensor in graph.tensors.values()}
    for place, one in enumerate(graph.exported.mutations):
        value = flat[one.output] if one.output < len(flat) else None
        made = by_node.get(value.name) if isinstance(value, Node) else None
        if one.output != place or made is None:
            yield f"{one.kind} {one.target} is written from result {one.output}, expected {place}"
        target = graph.tensors.get(one.target)
        if target is None:
            continue  # a tensor that the graph writes and does not read
        if target.kind != one.kind:
            yield f"{one.kind} {one.target} that is written is {target.kind} {target}"
        elif made is not None and (made.shape, made.dtype) != (target.shape, target.dtype):
            yield f"{target} is overwritten with {made}"


def _wrong_repeats(graph: NamedGraph) -> Iterator[str]:
    traced = _traced(graph)
    for repeat in graph.repeats:
        if len(repeat.layers) != repeat.count or len(repeat.module_paths) != repeat.count:
            yield f"{repeat.count} layers are described by {len(repeat.layers)} lists of ops"
        for path, layer in zip(repeat.module_paths, repeat.layers, strict=False):
            if len(layer) != repeat.period:
                yield f"{path} has {len(layer)} ops, expected {repeat.period}"
            yield from (f"{path}: the traced graph has no {name}" for name in layer if name not in traced)
    yield from (
        f"{name} is in two layers"
        for name in _repeated(name for repeat in graph.repeats for layer in repeat.layers for name in layer)
    )


GRAPH_INVARIANTS: tuple[Invariant[NamedGraph], ...] = (
    Invariant("names unique", "tensors and ops have names and fx nodes of their own", _names_that_repeat),
    Invariant("tensors exist", "operands, results, inputs and outputs name tensors of the graph", _missing_tensors),
    Invariant("one producer", "each activation is the result of one op, no other tensor of any", _producers),
    Invariant("defined before use", "an op reads inputs and results of earlier ops", _used_too_early),
    Invariant("shapes", "the atoms of each dim multiply to its extent, and stand in the order of dims", _wrong_shapes),
    Invariant("dims known", "tensors name dims that the graph lists", _unknown_dims),
    Invariant("gradients", "only real and complex numbers require a gradient", _wrong_gradients),
    Invariant("values as traced", "tensors have the shape and dtype of their fx node", _values_unlike_traced),
    Invariant("ops as traced", "ops stand in the traced order and take the traced operands", _ops_unlike_traced),
    Invariant("rule fits", "each operand and result has a term of the rule for each dim", _misfits),
    Invariant("factors equal", "a factor has one extent in all operands and results", _unequal_factors),
    Invariant("factor atoms", "the atoms of a factor multiply to its extent", _factor_atoms),
    Invariant("placeholders", "inputs, parameters, buffers, constants are the placeholders", _wrong_placeholders),
    Invariant("outputs", "outputs are the results of the traced graph after what it writes back", _wrong_results),
    Invariant("mutations", "what is written back has the shape and dtype of its target", _wrong_mutations),
    Invariant("repeated layers", "layers of a repeat have equally many ops of the traced graph", _wrong_repeats),
)
