"""Footprints of ops on shards: they depend on sizes alone, so those of equal sizes are measured once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import autopar
from autopar.cost.memory.local_memory import local_footprint
from autopar.ir.graph import NamedGraph
from autopar.ir.values import NamedNode
from autopar.mesh import SubMesh
from autopar.sharding.assignment import OpAssignment
from autopar.sharding.choices import choices, shardings_of
from autopar.sharding.lowered_ops import lowered_context
from examples.gpt import gpt


def assignments(graph: NamedGraph, node: NamedNode, axes: SubMesh) -> Iterator[OpAssignment]:
    sites = [(factor, atom) for factor, extents in node.atoms.items() for atom, one in enumerate(extents) if one > 1]
    for choice in choices(node, dict.fromkeys(axes, sites), axes):
        shardings = shardings_of(graph, node, choice)
        if shardings is not None:
            yield OpAssignment(choice, *shardings, shardings[1])


@pytest.mark.parametrize("op", ["layer_norm", "scaled_dot_product_attention"])
def test_footprints_are_measured_once_for_equal_sizes(op: str) -> None:
    model, inputs = gpt(layers=1, d_model=64, heads=4, seq=32, batch=8, device="meta")
    graph, axes = autopar.trace(model, inputs), SubMesh.of({"a": 2, "b": 2})
    node = next(node for node in graph.nodes if op in node.op)
    measured = 0
    for one in assignments(graph, node, axes):
        lowered = lowered_context(graph, node, one.choice.splits, one.operands, axes)
        if lowered is None:
            continue
        known = local_footprint(graph, node, one, lowered, axes)
        kept = dict(graph.local_footprints)
        graph.local_footprints.clear()
        assert local_footprint(graph, node, one, lowered, axes) == known, one.choice
        graph.local_footprints.update(kept)
        measured += 1
    assert 1 < len(graph.local_footprints) < measured
