"""The invariants of a named graph: each is broken once, and the verifier names it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.ir.exported import Mutation
from autopar.ir.graph import NamedGraph
from autopar.ir.invariants import Invariant, InvariantError, check_invariants, verifying
from autopar.ir.verify import GRAPH_INVARIANTS, verify_graph
from examples.gpt import gpt


@cache
def graph() -> NamedGraph:
    return autopar.trace(*gpt(layers=3))


def tensor(given: NamedGraph, name: str, **changes: Any) -> NamedGraph:
    return replace(given, tensors={**given.tensors, name: replace(given.tensors[name], **changes)})


def op(given: NamedGraph, place: int, **changes: Any) -> NamedGraph:
    nodes = list(given.nodes)
    nodes[place] = replace(nodes[place], **changes)
    return replace(given, nodes=tuple(nodes))


def linear(given: NamedGraph) -> int:
    return next(place for place, node in enumerate(given.nodes) if node.op == "aten.linear.default")


def with_factor(given: NamedGraph, field: str, value: Callable[[int], Any]) -> NamedGraph:
    node = given.nodes[linear(given)]
    factor = node.rule.factors[0]
    return op(given, linear(given), **{field: {**getattr(node, field), factor: value(node.sizes[factor])}})


def exported(given: NamedGraph, **changes: Any) -> NamedGraph:
    return replace(given, exported=replace(given.exported, **changes))


def without_a_layer(given: NamedGraph) -> NamedGraph:
    repeat = given.repeats[0]
    return replace(given, repeats=(replace(repeat, module_paths=repeat.module_paths[1:]),))


BROKEN: dict[str, Callable[[NamedGraph], NamedGraph]] = {
    "names unique": lambda g: replace(g, tensors={**g.tensors, "again": g.tensors["tokens.weight"]}),
    "tensors exist": lambda g: op(g, linear(g), operands=("nowhere", *g.nodes[linear(g)].operands[1:])),
    "one producer": lambda g: tensor(g, "tokens.weight", kind="activation"),
    "defined before use": lambda g: replace(g, nodes=g.nodes[::-1]),
    "shapes": lambda g: tensor(g, "tokens.weight", shape=(7, 7)),
    "dims known": lambda g: tensor(g, "tokens.weight", dims=("vocab", "nobody")),
    "gradients": lambda g: tensor(g, g.inputs[0], requires_grad=True),
    "values as traced": lambda g: tensor(g, "tokens.weight", dtype=torch.float64),
    "ops as traced": lambda g: op(g, linear(g), op="aten.relu.default"),
    "rule fits": lambda g: op(g, linear(g), rule=replace(g.nodes[linear(g)].rule, operands=())),
    "factors equal": lambda g: with_factor(g, "sizes", lambda size: size + 1),
    "factor atoms": lambda g: with_factor(g, "atoms", lambda size: (size, 2)),
    "placeholders": lambda g: exported(g, placeholders=g.exported.placeholders[::-1]),
    "outputs": lambda g: replace(g, outputs=()),
    "mutations": lambda g: exported(replace(g, outputs=()), mutations=(Mutation(1, g.inputs[0], "input"),)),
    "repeated layers": without_a_layer,
}


def test_a_traced_graph_keeps_all() -> None:
    verify_graph(graph())


def test_each_invariant_is_broken_below() -> None:
    assert list(BROKEN) == [row.name for row in GRAPH_INVARIANTS]


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_found(name: str) -> None:
    with pytest.raises(InvariantError, match="this is a bug of autopar") as error:
        verify_graph(BROKEN[name](graph()))
    assert error.value.invariant == name
    assert f"the named graph breaks the invariant '{name}'" in str(error.value)


def test_few_places_are_printed() -> None:
    rows = (Invariant("small", "numbers are small", lambda given: (f"number {one}" for one in range(given))),)
    with pytest.raises(InvariantError) as error:
        check_invariants("the list", rows, 100)
    assert [line.strip() for line in str(error.value).split("\n")[1:]] == [
        *(f"number {one}" for one in range(5)),
        "...",
        "this is a bug of autopar",
    ]
    check_invariants("the list", rows, 0)


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("yes", True), ("0", False), ("", False)])
def test_the_environment_turns_it_on(monkeypatch: pytest.MonkeyPatch, value: str, expected: bool) -> None:
    monkeypatch.setenv("AUTOPAR_VERIFY", value)
    assert verifying() is expected


@pytest.mark.parametrize(("value", "expected"), [("1", ["traced"]), ("0", [])])
def test_trace_verifies_where_it_is_on(monkeypatch: pytest.MonkeyPatch, value: str, expected: list[str]) -> None:
    found: list[str] = []
    monkeypatch.setenv("AUTOPAR_VERIFY", value)
    monkeypatch.setattr("autopar.tracing.trace.verify_graph", lambda graph: found.append("traced"))
    autopar.trace(nn.Linear(2, 2), (torch.ones(2, 2),))
    assert found == expected
