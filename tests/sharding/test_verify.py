"""The invariants of an assignment and of a reshard plan: each is broken once, and the verifier names it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import autopar
from autopar.ir.graph import NamedGraph
from autopar.ir.invariants import InvariantError
from autopar.mesh import SubMesh
from autopar.sharding.assignment import Assignment
from autopar.sharding.choices import Choice, can_split
from autopar.sharding.layout.language import parse_layout
from autopar.sharding.layout.parameter_storage import GatherPolicy
from autopar.sharding.propagation import propagate
from autopar.sharding.reshard_insertion import InsertedReshard, OpReshards, ReshardPlan, insert_reshards
from autopar.sharding.sharding import Sharding
from autopar.sharding.verify import (
    ASSIGNMENT_INVARIANTS,
    RESHARD_INVARIANTS,
    verify_assignment,
    verify_reshards,
)
from examples.gpt import gpt

LAYOUT = "batch -> dp; (heads, d_ff) -> tp; * -> none"
WEIGHT = "blocks.0.up.weight"


@cache
def planned() -> tuple[NamedGraph, Assignment, ReshardPlan]:
    graph = autopar.trace(*gpt(layers=3))
    axes = SubMesh.of({"dp": 2, "tp": 2, "one": 1})
    assignment = propagate(graph, parse_layout(LAYOUT), axes)
    return graph, assignment, insert_reshards(graph, assignment, "sharded", False)


def up() -> str:
    """Return the op that multiplies by WEIGHT."""
    return next(node.name for node in planned()[0].nodes if WEIGHT in node.operands)


def stored(name: str, change: Callable[[Sharding], Sharding]) -> Assignment:
    given = planned()[1]
    return replace(given, stored={**given.stored, name: change(given.stored[name])})


def op(**changes: Any) -> Assignment:
    given = planned()[1]
    return replace(given, ops={**given.ops, up(): replace(given.ops[up()], **changes)})


def value(name: str, sharding: Sharding) -> Assignment:
    given = planned()[1]
    return replace(given, values={**given.values, name: sharding})


def without_op() -> Assignment:
    given = planned()[1]
    return replace(given, ops={name: one for name, one in given.ops.items() if name != up()})


def repeated_axis() -> Assignment:
    (site, _), *_ = planned()[1].ops[up()].choice.splits
    return op(choice=Choice(((site, ("dp", "dp")),)))


def illegal_split() -> Assignment:
    """Split a factor that the rule leaves whole."""
    graph, given, _ = planned()
    sites = ((node, (factor, 0)) for node in graph.nodes for factor in node.rule.kinds)
    node, site = next((node, site) for node, site in sites if not can_split(node, site, ("dp",), given.axes, True))
    choice = Choice(((site, ("dp",)),))
    return replace(given, ops={**given.ops, node.name: replace(given.ops[node.name], choice=choice)})


def broadcast_ids() -> Assignment:
    """Broadcast the tokens, integers without a gradient."""
    graph, given, _ = planned()
    return value(graph.inputs[0], replace(given.values[graph.inputs[0]], broadcast=frozenset({"one"})))


def policy(name: str, one: GatherPolicy) -> Assignment:
    given = planned()[1]
    return replace(given, gather_policies={**given.gather_policies, name: one})


BROKEN: dict[str, Callable[[], Assignment]] = {
    "mesh": lambda: replace(planned()[1], axes=SubMesh({"dp": 2, "tp": 2, "one": 0})),
    "complete": without_op,
    "fits tensor": lambda: stored(WEIGHT, lambda one: replace(one, splits=())),
    "axis once": repeated_axis,
    "split allowed": illegal_split,
    "choice": lambda: op(choice=Choice()),
    "values": lambda: value(_result(), replace(planned()[1].values[_result()], partial=frozenset({"one"}))),
    "storage": lambda: stored(WEIGHT, lambda one: replace(one, partial=frozenset({"one"}))),
    "broadcast": broadcast_ids,
    "gather policies": lambda: policy(WEIGHT, GatherPolicy(True, False, True)),
    "recompute": lambda: replace(planned()[1], recompute={"nowhere": "full"}),
}


def _result() -> str:
    name = next(node.outputs[0] for node in planned()[0].nodes if node.name == up())
    assert name is not None
    return name


def test_what_propagation_gives_keeps_all() -> None:
    graph, assignment, reshards = planned()
    verify_assignment(graph, assignment)
    verify_reshards(graph, assignment, reshards)


def test_each_invariant_is_broken_below() -> None:
    assert {*BROKEN, "booleans"} == {row.name for row in ASSIGNMENT_INVARIANTS}
    assert {*UNRESHARDED, "results"} == {row.name for row in RESHARD_INVARIANTS}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_in_an_assignment_is_found(name: str) -> None:
    with pytest.raises(InvariantError) as error:
        verify_assignment(planned()[0], BROKEN[name]())
    assert error.value.invariant == name, error.value


def test_a_partial_boolean_is_found() -> None:
    """The tokens are said to be booleans: their value is summed over an axis."""
    graph, given, _ = planned()
    name = graph.inputs[0]
    tensors = {**graph.tensors, name: replace(graph.tensors[name], dtype=torch.bool)}
    values = {**given.values, name: replace(given.values[name], partial=frozenset({"one"}))}
    with pytest.raises(InvariantError) as error:
        verify_assignment(replace(graph, tensors=tensors), replace(given, values=values))
    assert error.value.invariant == "booleans", error.value


def plan_of(change: Callable[[OpReshards], OpReshards], has: str) -> ReshardPlan:
    """Change the reshards of the first op that has some of a kind."""
    plan = planned()[2]
    name = next(name for name, one in plan.ops.items() if any(each.ways for each in getattr(one, has)))
    return replace(plan, ops={**plan.ops, name: change(plan.ops[name])})


def first(one: OpReshards, **changes: Any) -> OpReshards:
    """Change the first reshard after an op."""
    place = next(i for i, each in enumerate(one.after) if each.ways)
    after = list(one.after)
    after[place] = replace(after[place], reshard=replace(after[place].reshard, **changes))
    return replace(one, after=tuple(after))


def useless(one: OpReshards) -> OpReshards:
    place = next(i for i, each in enumerate(one.after) if each.reshard.forward)
    reshard = one.after[place].reshard
    steps = tuple(replace(step, axes=("one",)) for step in reshard.forward)
    return first(one, forward=steps)


def again(one: OpReshards) -> OpReshards:
    return replace(one, after=(*one.after, next(each for each in one.after if each.ways)))


UNRESHARDED: dict[str, Callable[[], ReshardPlan]] = {
    "operands": lambda: plan_of(lambda one: replace(one, operands=one.operands[::-1]), "after"),
    "available": lambda: plan_of(lambda one: replace(one, after=()), "after"),
    "chains": lambda: plan_of(lambda one: first(one, forward=()), "after"),
    "resharded once": lambda: plan_of(again, "after"),
    "steps": lambda: plan_of(useless, "after"),
}


@pytest.mark.parametrize("name", UNRESHARDED)
def test_what_is_broken_in_a_reshard_plan_is_found(name: str) -> None:
    graph, assignment, _ = planned()
    with pytest.raises(InvariantError) as error:
        verify_reshards(graph, assignment, UNRESHARDED[name]())
    assert error.value.invariant == name, error.value


def test_shards_handed_out_where_whole_results_are_asked_for_are_found() -> None:
    graph = autopar.trace(torch.nn.Linear(4, 2), (torch.ones(8, 4),))
    assignment = propagate(graph, parse_layout("batch -> dp; * -> none"), SubMesh.of({"dp": 2}))
    reshards = insert_reshards(graph, assignment, "sharded", False)
    verify_reshards(graph, assignment, reshards, "sharded")
    with pytest.raises(InvariantError) as error:
        verify_reshards(graph, assignment, reshards, "full")
    assert error.value.invariant == "results", error.value


def test_inserted_reshards_are_what_is_verified() -> None:
    assert any(isinstance(one, InsertedReshard) and one.ways for one in planned()[2].inserted())
