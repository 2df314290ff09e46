"""The invariants of an assignment and of its reshard plan, checked where stages hand them on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

import torch

from autopar.ir.graph import NamedGraph
from autopar.ir.invariants import Invariant, check_invariants
from autopar.ir.values import NamedTensor
from autopar.sharding.assignment import Assignment, OpAssignment
from autopar.sharding.choices import can_split, shardings_of
from autopar.sharding.layout.recompute_ops import RecomputeList
from autopar.sharding.layout.syntax import RecomputeMode
from autopar.sharding.lowered_ops.ring_attention import rows_beside
from autopar.sharding.options import Outputs
from autopar.sharding.reshard.reshard import Reshard, Step
from autopar.sharding.reshard_insertion import InsertedReshard, ReshardPlan
from autopar.sharding.sharding import MICRO, Sharding, atoms_of, without_time

__all__ = ["ASSIGNMENT_INVARIANTS", "RESHARD_INVARIANTS", "verify_assignment", "verify_reshards"]


@dataclass(frozen=True)
class _Assigned:
    """An assignment with the graph that it is for."""

    graph: NamedGraph
    assignment: Assignment

    def shardings(self) -> Iterator[tuple[str, NamedTensor, Sharding]]:
        """Yield every sharding with its tensor and the place where it stands."""
        tensors = self.graph.tensors
        yield from ((f"stored {name}", tensors[name], one) for name, one in self.assignment.stored.items())
        yield from ((f"value {name}", tensors[name], one) for name, one in self.assignment.values.items())
        for node in self.graph.nodes:
            op = self.assignment.ops[node.name]
            groups = ("takes", node.operands, op.operands), ("gives", node.outputs, op.produced)
            for word, names, shardings in (*groups, ("hands on", node.outputs, op.results)):
                for name, sharding in zip(names, shardings, strict=True):
                    if name is not None and sharding is not None:
                        yield f"{node.name} {word} {name}", tensors[name], sharding


def verify_assignment(graph: NamedGraph, assignment: Assignment) -> None:
    """Raise `InvariantError` if an assignment breaks one of `ASSIGNMENT_INVARIANTS`."""
    check_invariants("the assignment", ASSIGNMENT_INVARIANTS, _Assigned(graph, assignment))


def _empty_axes(given: _Assigned) -> Iterator[str]:
    axes = given.assignment.axes
    yield from (f"axis '{axis}' has {size} ranks" for axis, size in axes.items() if size < 1)


def _incomplete(given: _Assigned) -> Iterator[str]:
    graph, assignment = given.graph, given.assignment
    held = {name for name, tensor in graph.tensors.items() if tensor.kind != "activation"}
    for what, found, expected in (
        ("ops", assignment.ops.keys(), {node.name for node in graph.nodes}),
        ("stored tensors", assignment.stored.keys(), held),
        ("values", assignment.values.keys(), graph.tensors.keys()),
    ):
        if found != expected:
            missing, unknown = sorted(expected - found), sorted(found - expected)
            yield f"{what}: {missing or 'none'} missing, {unknown or 'none'} unknown"
    for node in graph.nodes:
        op = assignment.ops.get(node.name)
        if op is None:
            continue
        for names, shardings in ((node.operands, op.operands), (node.outputs, op.produced), (node.outputs, op.results)):
            if [name is None for name in names] != [one is None for one in shardings]:
                yield f"{node.name}: shardings {list(map(str, shardings))} of {list(names)}"


def _misfits(given: _Assigned) -> Iterator[str]:
    axes = given.assignment.axes
    for place, tensor, sharding in given.shardings():
        if len(sharding.splits) != len(tensor.atoms):
            yield f"{place}: {sharding} is for {len(sharding.splits)} atoms, {tensor} has {len(tensor.atoms)}"
        unknown = [axis for axis in sharding.axes if axis not in axes]
        if unknown:
            yield f"{place}: {sharding} names {', '.join(unknown)}, the mesh has {', '.join(axes)}"


def _repeated_axes(given: _Assigned) -> Iterator[str]:
    # A sharding refuses a repeated axis when it is made.
    nodes = {node.name: node for node in given.graph.nodes}
    for name, op in given.assignment.ops.items():
        node = nodes[name]
        # The axes of keys split the rows too.
        alone = (axes for site, axes in op.choice.splits if rows_beside(node, site) is None)
        used = [*(axis for axes in alone for axis in axes), *(axis for axis, _ in op.choice.passes)]
        if len(set(used)) < len(used):
            yield f"{name} chooses {op.choice}"


def _illegal_splits(given: _Assigned) -> Iterator[str]:
    axes = given.assignment.axes
    for node in given.graph.nodes:
        for site, used in given.assignment.ops[node.name].choice.splits:
            if not can_split(node, site, used, axes, uneven=True):
                yield f"{node.name}: the rule {node.rule} does not allow {site[0]} -> {'*'.join(used)}"
            rows = rows_beside(node, site)
            if rows is not None and not set(used) <= set(given.assignment.ops[node.name].choice.of(rows)):
                yield f"{node.name} splits {site[0]} by {'*'.join(used)}, and its rows not"


def _unlike_choice(given: _Assigned) -> Iterator[str]:
    forms = given.graph.forms
    right: set[tuple[int, OpAssignment]] = set()  # equal ops with equal assignments are checked once
    for node in given.graph.nodes:
        op = given.assignment.ops[node.name]
        if (forms[node.name], op) in right:
            continue
        wanted = shardings_of(given.graph, node, op.choice)
        if wanted != (op.operands, op.produced):
            shown = "impossible" if wanted is None else " -> ".join(str(list(map(str, side))) for side in wanted)
            yield f"{node.name} chooses {str(op.choice) or 'nothing'}, which means {shown}; it has {_shown(op)}"
        else:
            right.add((forms[node.name], op))


def _shown(op: OpAssignment) -> str:
    return " -> ".join(str(list(map(str, side))) for side in (op.operands, op.produced))


def _values_unlike_results(given: _Assigned) -> Iterator[str]:
    assignment = given.assignment
    for node in given.graph.nodes:
        for name, result in zip(node.outputs, assignment.ops[node.name].results, strict=True):
            if name is not None and assignment.values[name] != result:
                yield f"{node.name} hands on {name} as {result}, its users find {assignment.values[name]}"


def _illegal_storage(given: _Assigned) -> Iterator[str]:
    for name, sharding in given.assignment.stored.items():
        kind = given.graph.tensors[name].kind
        if sharding.partial or sharding.broadcast:
            yield f"the {kind} {name} is stored as {sharding}: shards are pieces or whole"
        if kind in ("buffer", "constant") and sharding.axes:
            yield f"the {kind} {name} is stored as {sharding}: each rank has all of it"


def _split_booleans_summed(given: _Assigned) -> Iterator[str]:
    for place, tensor, sharding in given.shardings():
        if sharding.partial and tensor.dtype is torch.bool:
            yield f"{place}: {sharding} of booleans"


def _broadcasts_without_gradient(given: _Assigned) -> Iterator[str]:
    for place, tensor, sharding in given.shardings():
        if sharding.broadcast and not tensor.requires_grad:
            yield f"{place}: {sharding} requires no gradient"


def _wrong_gather_policies(given: _Assigned) -> Iterator[str]:
    for name, policy in given.assignment.gather_policies.items():
        tensor = given.graph.tensors.get(name)
        if tensor is None or tensor.kind != "param":
            yield f"{name} is no parameter"
        if policy.keep_gathered and policy.regather:
            yield f"{name} stays gathered and is gathered again"


def _wrong_recompute(given: _Assigned) -> Iterator[str]:
    for path, mode in given.assignment.recompute.items():
        if path not in given.graph.ops_of_layers:
            yield f"{path} is no layer"
        if not isinstance(mode, RecomputeList) and mode not in get_args(RecomputeMode):
            yield f"{path}: {mode!r} is no mode"


ASSIGNMENT_INVARIANTS: tuple[Invariant[_Assigned], ...] = (
    Invariant("mesh", "every axis of the mesh has a rank", _empty_axes),
    Invariant("complete", "every op, stored tensor and value of the graph is assigned, and no other", _incomplete),
    Invariant("fits tensor", "a sharding has an entry for each atom and names axes of the mesh", _misfits),
    Invariant("axis once", "an axis stands at most once in a choice", _repeated_axes),
    Invariant("split allowed", "the rule and the extents allow what a choice splits", _illegal_splits),
    Invariant("choice", "operands and results of an op have the shardings that its choice means", _unlike_choice),
    Invariant("values", "users of a result find it in the sharding that its op hands on", _values_unlike_results),
    Invariant("storage", "stored tensors are pieces or whole; buffers and constants are whole", _illegal_storage),
    Invariant("booleans", "no boolean tensor is partial", _split_booleans_summed),
    Invariant("broadcast", "only what requires a gradient is broadcast", _broadcasts_without_gradient),
    Invariant("gather policies", "a policy is of a parameter and does not contradict itself", _wrong_gather_policies),
    Invariant("recompute", "recompute modes are of layers", _wrong_recompute),
)


# -- the reshard plan -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Wired:
    """A reshard plan with what it was made from."""

    graph: NamedGraph
    assignment: Assignment
    reshard_plan: ReshardPlan
    outputs: Outputs

    def inserted(self) -> Iterator[InsertedReshard]:
        """Yield the reshards between ops in order; the messages inside ops are not among them."""
        yield from self.reshard_plan.inputs.values()
        for op in self.reshard_plan.ops.values():
            yield from (*op.before, *op.after)
        yield from self.reshard_plan.outputs


def verify_reshards(
    graph: NamedGraph, assignment: Assignment, reshard_plan: ReshardPlan, outputs: Outputs = "sharded"
) -> None:
    """Raise `InvariantError` if a reshard plan breaks one of `RESHARD_INVARIANTS`."""
    check_invariants("the reshard plan", RESHARD_INVARIANTS, _Wired(graph, assignment, reshard_plan, outputs))


def _operands_unlike_choice(given: _Wired) -> Iterator[str]:
    for node in given.graph.nodes:
        wanted = given.assignment.ops[node.name].operands
        found = given.reshard_plan.ops[node.name].operands
        pairs = [None if one is None else (name, one) for name, one in zip(node.operands, wanted, strict=True)]
        if list(found) != pairs:
            yield f"{node.name} finds {_names(found)}, wants {_names(pairs)}"


def _names(pairs: object) -> str:
    assert isinstance(pairs, list | tuple), pairs
    return ", ".join("nothing" if pair is None else f"{pair[0]} as {pair[1]}" for pair in pairs)


def _absent_values(given: _Wired) -> Iterator[str]:
    """Walk the plan in order and look for shardings in which a value is not there yet."""
    plan, tensors = given.reshard_plan, given.graph.tensors
    there = {(name, sharding) for name, sharding in given.assignment.stored.items() if name not in plan.inputs}
    there |= {(name, Sharding.replicated(atoms_of(tensors[name]))) for name in plan.inputs}

    def resharded(one: InsertedReshard) -> Iterator[str]:
        if (one.tensor, one.source) not in there:
            yield f"{one.tensor} for {one.op} is resharded from {one.source}, which it does not have"
        there.add((one.tensor, one.target))

    for one in plan.inputs.values():
        yield from resharded(one)
    for node in given.graph.nodes:
        wired = plan.ops[node.name]
        for one in wired.before:
            yield from resharded(one)
        for place in wired.operands:
            if place is not None and place not in there:
                yield f"{node.name} takes {place[0]} as {place[1]}, which it does not have"
        produced = given.assignment.ops[node.name].produced
        there |= {(name, one) for name, one in zip(node.outputs, produced, strict=True) if name and one}
        for one in wired.after:
            yield from resharded(one)
    for one in plan.outputs:
        yield from resharded(one)
    for place in plan.results:
        if place is not None and place not in there:
            yield f"{place[0]} is handed out as {place[1]}, which it does not have"


def _broken_chains(given: _Wired) -> Iterator[str]:
    known: set[Reshard] = set()
    for one in given.inserted():
        if one.reshard in known:
            continue
        known.add(one.reshard)
        reshard, axes = one.reshard, given.assignment.axes
        if one.in_time is not None:
            axes = without_time(axes)
            if (reshard.source, reshard.target) != tuple(end.without([MICRO]) for end in one.in_time):
                yield f"{one.tensor} for {one.op}: {reshard} is not what the ranks do of {one.source} as {one.target}"
        ways = (
            ("forward", reshard.forward, reshard.source, reshard.target),
            (
                "backward",
                reshard.backward,
                reshard.target.gradient,
                reshard.source.gradient,
            ),
        )
        single = [axis for axis, size in axes.items() if size == 1]
        for word, steps, source, target in ways:
            ends = [source.value.without(single), *_ends(steps)]
            begins = [*(step.before for step in steps), target.value.without(single)]
            if ends != begins:
                yield f"{one.tensor} for {one.op}, {word} from {source} to {target}: {', '.join(map(str, steps))}"
        if reshard.axes != axes or reshard.atoms != atoms_of(given.graph.tensors[one.tensor]):
            yield f"{one.tensor} for {one.op}: {reshard} is for another tensor or mesh"


def _ends(steps: tuple[Step, ...]) -> Iterator[Sharding]:
    yield from (step.after for step in steps)


def _repeated_reshards(given: _Wired) -> Iterator[str]:
    counts = Counter((one.tensor, one.source, one.target) for one in given.inserted())
    yield from (f"{name} from {source} to {target}" for (name, source, target), count in counts.items() if count > 1)


def _useless_steps(given: _Wired) -> Iterator[str]:
    axes = given.assignment.axes
    for one in given.reshard_plan.inserted():
        for step in one.ways:
            if any(axes[axis] < 2 for axis in step.axes):
                yield f"{one.tensor} for {one.op}: {step} over an axis of one rank"


def _partial_results(given: _Wired) -> Iterator[str]:
    for place, result in enumerate(given.reshard_plan.results):
        if result is None:
            continue
        name, sharding = result
        if sharding.partial or sharding.broadcast:
            yield f"result {place}, {name}, is handed out as {sharding}"
        whole = place < len(given.graph.exported.mutations) or given.outputs == "full"
        if whole and sharding.axes:
            yield f"result {place}, {name}, is handed out as {sharding}, expected whole"


RESHARD_INVARIANTS: tuple[Invariant[_Wired], ...] = (
    Invariant("operands", "each op finds its operands as its choice wants them", _operands_unlike_choice),
    Invariant("available", "a value is read in a sharding that it has by then", _absent_values),
    Invariant("chains", "the steps of a reshard lead from its source to its target, both ways", _broken_chains),
    Invariant("resharded once", "no value is brought into one sharding twice", _repeated_reshards),
    Invariant("steps", "no step is over an axis of one rank", _useless_steps),
    Invariant(
        "results", "results are pieces or whole; whole where they are written back or asked for", _partial_results
    ),
)
