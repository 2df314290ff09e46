"""Random decisions: any legal choice for each op, any layout for each value, whatever it costs.

A completion, or a search, takes but few of the choices that `autopar.sharding.choices` calls legal; here all of them
are had.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

import torch

from autopar.ir.graph import NamedGraph
from autopar.ir.values import NamedNode, NamedTensor
from autopar.sharding.assignment import Assignment, OpAssignment
from autopar.sharding.choices import Choice, Site, choices, passings_of, shardings_of
from autopar.sharding.sharding import Sharding, atoms_of

__all__ = ["random_decisions"]


class _Everywhere:
    """Any site may be cut unevenly."""

    def __contains__(self, item: object) -> bool:
        return True

    def __iter__(self) -> None:  # type: ignore[override]
        raise AssertionError("asked for one at a time")

    def __len__(self) -> int:
        raise AssertionError("asked for one at a time")


def random_decisions(draw: random.Random, graph: NamedGraph, axes: Mapping[str, int]) -> Assignment:
    """Decisions about a graph: every op splits something along each axis, passes sums through, or does not use it."""
    stored = {}
    for tensor in graph.tensors.values():
        if tensor.kind != "activation":
            held = tensor.kind in ("param", "input") and draw.random() < 0.6
            stored[tensor.name] = _any_layout(draw, tensor, axes, "RS") if held else _whole(tensor)
    values = dict(stored)
    ops = {}
    for node in graph.nodes:
        op_assignment = ops[node.name] = _decided(draw, graph, node, axes)
        for name, result in zip(node.outputs, op_assignment.results, strict=True):
            if name is not None and result is not None:
                values[name] = result
    return Assignment(axes, stored, ops, values)


def _decided(draw: random.Random, graph: NamedGraph, node: NamedNode, axes: Mapping[str, int]) -> OpAssignment:
    choice = _any_choice(draw, graph, node, axes)
    found = shardings_of(graph, node, choice)
    assert found is not None, (node.name, choice)
    operands, produced = found
    results = tuple(
        None if name is None or layout is None else _result(draw, graph.tensors[name], layout, axes)
        for name, layout in zip(node.outputs, produced, strict=True)
    )
    return OpAssignment(choice, operands, produced, results)


def _any_choice(draw: random.Random, graph: NamedGraph, node: NamedNode, axes: Mapping[str, int]) -> Choice:
    """One of those that use the most axes, of the ways picked for each."""
    sites: list[Site] = [(factor, atom) for factor, extents in node.atoms.items() for atom in range(len(extents))]
    passes = passings_of(graph, node)
    picked = {axis: draw.sample(sites, min(2, len(sites))) for axis in axes}
    passing = {axis: draw.sample(passes, 1) for axis in axes if passes and draw.random() < 0.35}
    legal = [
        choice
        for choice in choices(node, picked, axes, _Everywhere(), passing)  # type: ignore[arg-type]
        if shardings_of(graph, node, choice) is not None
    ]
    most = max(len(choice.axes) + len(choice.passes) for choice in legal)
    return draw.choice([choice for choice in legal if len(choice.axes) + len(choice.passes) == most])


def _result(draw: random.Random, tensor: NamedTensor, produced: Sharding, axes: Mapping[str, int]) -> Sharding:
    if draw.random() < 0.5:
        return produced
    return _any_layout(draw, tensor, axes, "RRSSSBP" if tensor.dtype is not torch.bool else "RSS")


def _any_layout(draw: random.Random, tensor: NamedTensor, axes: Mapping[str, int], states: str) -> Sharding:
    splits: list[list[str]] = [[] for _ in tensor.atoms]
    marks: dict[str, set[str]] = {"P": set(), "B": set()}
    for axis in draw.sample(list(axes), len(axes)):
        state = draw.choice(states)
        if state == "S" and splits:
            draw.choice(splits).append(axis)
        elif state in marks and (state == "P" or tensor.requires_grad):
            marks[state].add(axis)
    return Sharding(tuple(map(tuple, splits)), frozenset(marks["P"]), frozenset(marks["B"]))


def _whole(tensor: NamedTensor) -> Sharding:
    return Sharding.replicated(atoms_of(tensor))
