"""Graph of one micro-batch: the ops and names of the whole graph, with the sizes of one part of the batch.

`micro 8` runs the same ops eight times, each on an eighth of the batch. Prices and the search see one of these runs.
Propagation of the statement alone tells which dim of each tensor the micro-batches split. Tensors without such a dim,
as parameters, keep their sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod
from types import MappingProxyType
from weakref import WeakKeyDictionary

from autopar.ir.analysis.op_memory import Footprint
from autopar.ir.graph import NamedGraph
from autopar.ir.values import NamedNode
from autopar.mesh import SubMesh
from autopar.sharding.assignment import Assignment, OpAssignment, StepPlan
from autopar.sharding.choices import Choice, Site, sites_of
from autopar.sharding.layout.language import Layout
from autopar.sharding.layout.parameter_storage import GatherPolicy
from autopar.sharding.layout.syntax import MicroBatches
from autopar.sharding.propagation import PropagationCache, propagate
from autopar.sharding.sharding import MICRO, Sharding, without_time

__all__ = [
    "gathered_once",
    "gathered_where_used",
    "propagate_plan",
    "sites_in_time",
    "slice_in_time",
    "slice_of_half",
    "step_plan",
    "time_assignment",
]

_ASSIGNMENTS: WeakKeyDictionary[NamedGraph, dict[MicroBatches, Assignment]] = WeakKeyDictionary()
_SLICES: WeakKeyDictionary[NamedGraph, dict[MicroBatches, NamedGraph]] = WeakKeyDictionary()


def slice_in_time(graph: NamedGraph, micro: MicroBatches) -> NamedGraph:
    """Return the graph of one micro-batch, with both of its halves; equal requests share it."""
    return _slice(graph, replace(micro, halves=False))


def slice_of_half(graph: NamedGraph, micro: MicroBatches) -> NamedGraph | None:
    """Return the graph of half a micro-batch, where the halves run side by side; None where they do not."""
    return _slice(graph, MicroBatches(micro.parts, micro.dim)) if micro.halves else None


def _slice(graph: NamedGraph, micro: MicroBatches) -> NamedGraph:
    known = _SLICES.setdefault(graph, {})
    if micro not in known:
        known[micro] = _sliced(graph, time_assignment(graph, micro), micro.count)
    return known[micro]


def time_assignment(graph: NamedGraph, micro: MicroBatches) -> Assignment:
    """Return the assignment on a single rank, along the micro-batches alone."""
    known = _ASSIGNMENTS.setdefault(graph, {})
    if micro not in known:
        known[micro] = propagate(graph, Layout((micro,)), SubMesh({}))
    return known[micro]


def sites_in_time(graph: NamedGraph, micro: MicroBatches) -> Mapping[str, frozenset[Site]]:
    """Return the sites of each op that the micro-batches split."""
    return _sites_of_ops(graph, time_assignment(graph, micro))


# -- the graph ---------------------------------------------------------------------------------------------------------


def _sliced(graph: NamedGraph, assignment: Assignment, count: int) -> NamedGraph:
    atoms, split = _split_atoms(graph, assignment), _sites_of_ops(graph, assignment)
    tensors = dict(graph.tensors)
    for name, split_atom in atoms.items():
        tensor = tensors[name]
        parts = tuple(
            atom._replace(size=max(1, atom.size // count)) if i == split_atom else atom
            for i, atom in enumerate(tensor.atoms)
        )
        shape = tuple(prod(atom.size for atom in parts if atom.dim == dim) for dim in range(len(tensor.shape)))
        tensors[name] = replace(tensor, atoms=parts, shape=shape)
    nodes = tuple(_smaller(node, split[node.name], count) for node in graph.nodes)
    found = replace(graph, tensors=MappingProxyType(tensors), nodes=nodes)
    # Analyses that run ops: those of the whole graph hold for its parts.
    found.__dict__["footprints"] = _footprints(graph, {node.node for node in graph.nodes if split[node.name]}, count)
    found.__dict__["passable_sums"] = graph.passable_sums
    return found


def _split_atoms(graph: NamedGraph, assignment: Assignment) -> dict[str, int]:
    """Return the atom of each tensor that the micro-batches split."""
    found: dict[str, int] = {}
    pairs: list[tuple[str | None, Sharding | None]] = list(assignment.values.items())
    for node in graph.nodes:
        op = assignment.ops[node.name]
        pairs += [*zip(node.operands, op.operands, strict=True), *zip(node.outputs, op.produced, strict=True)]
    for name, sharding in pairs:
        atom = None if name is None or sharding is None else sharding.atom(MICRO)
        if name is not None and atom is not None:
            found.setdefault(name, atom)
    return found


def _sites_of_ops(graph: NamedGraph, assignment: Assignment) -> dict[str, frozenset[Site]]:
    atoms = _split_atoms(graph, assignment)
    return {node.name: _split_sites(graph, node, assignment.ops[node.name].choice, atoms) for node in graph.nodes}


def _split_sites(graph: NamedGraph, node: NamedNode, choice: Choice, atoms: Mapping[str, int]) -> frozenset[Site]:
    """Return the sites of an op that the micro-batches split: its own, and those of the tensors that they split."""
    found = {site for site, axes in choice.splits if MICRO in axes}
    ends = (
        *zip(node.rule.operands, node.operands, strict=False),
        *zip(node.rule.outputs, node.outputs, strict=True),
    )
    for operand, name in ends:
        atom = None if name is None else atoms.get(name)
        if name is None or atom is None:
            continue
        sites = sites_of(node, operand, graph.tensors[name])
        site = None if sites is None else sites[atom]
        if site is not None:
            found.add(site)
    return frozenset(found)


def _smaller(node: NamedNode, split: frozenset[Site], count: int) -> NamedNode:
    if not split:
        return node
    atoms, sizes = dict(node.atoms), dict(node.sizes)
    for factor, atom in split:
        extents = atoms[factor]
        atoms[factor] = tuple(max(1, size // count) if i == atom else size for i, size in enumerate(extents))
        sizes[factor] = max(1, sizes[factor] // count)
    return replace(node, atoms=MappingProxyType(atoms), sizes=MappingProxyType(sizes))


def _footprints(graph: NamedGraph, split: Iterable[str], count: int) -> Mapping[str, Footprint]:
    """Return the footprints of the ops; equal ones stay one object."""
    smaller: dict[int, Footprint] = {}
    found = dict(graph.footprints)
    for name in split:
        whole = found[name]
        if id(whole) not in smaller:
            smaller[id(whole)] = replace(
                whole,
                internal_bytes=whole.internal_bytes // count,
                forward_bytes=whole.forward_bytes // count,
                backward_bytes=whole.backward_bytes // count,
            )
        found[name] = smaller[id(whole)]
    return found


# -- plans -------------------------------------------------------------------------------------------------------


def propagate_plan(graph: NamedGraph, layout: Layout, axes: SubMesh, cache: PropagationCache | None = None) -> StepPlan:
    """Return the plan of a layout without holes; `dataclasses.replace` sets its options."""
    return step_plan(graph, layout, propagate(graph, layout, axes, cache))


def step_plan(graph: NamedGraph, layout: Layout, assignment: Assignment) -> StepPlan:
    """Return the plan of an assignment that a layout completes."""
    parts, named = assignment.axes.get(MICRO, 1), layout.micro_batches or layout.open_micro_batches
    # Propagation chooses the number where the layout names stages alone.
    runs, dim = None, "batch" if named is None else named.dim
    if parts > 1:
        runs = MicroBatches(parts // 2 if assignment.halves else parts, dim, assignment.halves)
    return StepPlan(graph.fingerprint, _without_micro(assignment), micro=runs)


def _without_micro(assignment: Assignment) -> Assignment:
    """Return the assignment along the axes of the mesh alone."""
    if MICRO not in assignment.axes:
        return assignment
    known: dict[Sharding | None, Sharding | None] = {None: None}

    def plain(sharding: Sharding | None) -> Sharding | None:
        if sharding not in known:
            assert sharding is not None
            known[sharding] = sharding.without([MICRO])
        return known[sharding]

    def every(shardings: Mapping[str, Sharding]) -> dict[str, Sharding]:
        return {name: sharding.without([MICRO]) for name, sharding in shardings.items()}

    ops = {}
    for name, op in assignment.ops.items():
        splits = ((site, tuple(axis for axis in axes if axis != MICRO)) for site, axes in op.choice.splits)
        passes = tuple((axis, passing) for axis, passing in op.choice.passes if axis != MICRO)
        choice = Choice(tuple((site, axes) for site, axes in splits if axes), passes)
        ends = (tuple(map(plain, shardings)) for shardings in (op.operands, op.produced, op.results))
        ops[name] = OpAssignment(choice, *ends)
    return replace(
        assignment,
        axes=without_time(assignment.axes),
        stored=every(assignment.stored),
        values=every(assignment.values),
        ops=ops,
    )


def gathered_once(assignment: Assignment) -> Assignment:
    """Return the assignment with the gather policies by which a call with micro-batches runs.

    A parameter is gathered before all micro-batches and its gradient is reduced after them. One with `regather` is
    gathered, twice, and reduced in each of them, unless it is whole and needs no gather.
    """
    gathered = {name for name, one in assignment.stored.items() if one.splits != assignment.values[name].splits}
    again = {name for name, policy in assignment.gather_policies.items() if policy.regather and name in gathered}
    policies = {
        name: GatherPolicy(name in gathered - again, name not in again, name in again)
        for name in assignment.gather_policies
    }
    return replace(assignment, gather_policies=policies)


def gathered_where_used(assignment: Assignment) -> Assignment:
    """Return the assignment with the gather policies that a layout states for parameters stored as `param`."""
    policies = {
        name: GatherPolicy(False, assignment.stored[name].splits == assignment.values[name].splits, policy.regather)
        for name, policy in assignment.gather_policies.items()
    }
    return replace(assignment, gather_policies=policies)
