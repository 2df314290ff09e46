"""The invariants of a generated graph: each is broken once, and the verifier names it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from torch.fx import Node

import autopar
from autopar.ir.graph import NamedGraph
from autopar.ir.invariants import InvariantError
from autopar.lowering.emit import emit
from autopar.lowering.emitted import Emitted
from autopar.lowering.modules.bucket_ends import BucketEnd
from autopar.lowering.modules.shard_ops import LoweredOpModule, ReshardModule
from autopar.lowering.verify import EMITTED_INVARIANTS, verify_emitted
from autopar.lowering.verify_shapes import SHARD
from autopar.mesh import SubMesh
from autopar.sharding.assignment import Assignment
from autopar.sharding.layout.language import parse_layout
from autopar.sharding.propagation import propagate
from autopar.sharding.reshard_insertion import insert_reshards
from autopar.sharding.sharding import Sharding, atoms_of
from examples.gpt import gpt
from tests.ranks import SimulatedGroups, on_ranks

AXES = SubMesh({"dp": 2, "tp": 2})


HEADS = "batch -> dp; (heads, d_ff) -> tp; * -> none; param { d_model -> dp }"
RING = "batch -> dp; seq -> tp; op @*/scaled_dot_product_attention[a -> dp, s -> tp, t -> tp]; * -> none"


@cache
def planned(layout: str = HEADS) -> tuple[NamedGraph, Assignment]:
    graph = autopar.trace(*gpt(layers=1))
    return graph, propagate(graph, parse_layout(layout), AXES)


def check(change: Callable[[Emitted], Emitted | None], layout: str = HEADS) -> None:
    """Emit the graph of each rank, change that of the first, verify all."""
    graph, assignment = planned(layout)
    reshards = insert_reshards(graph, assignment, "sharded", False)

    def verify(groups: SimulatedGroups) -> None:
        emitted = emit(graph, assignment, groups, "sharded", False)
        if groups.rank == 0:
            emitted = change(emitted) or emitted
        verify_emitted(graph, assignment, groups, reshards, emitted)

    on_ranks(AXES, verify)


def calls(emitted: Emitted, kind: type) -> list[tuple[Node, Any]]:
    module = emitted.graph_module
    called = [(one, module.get_submodule(str(one.target))) for one in module.graph.nodes if one.op == "call_module"]
    found = [(one, each) for one, each in called if isinstance(each, kind)]
    assert found
    return found


def sending(emitted: Emitted) -> tuple[Node, ReshardModule]:
    return next(
        (n, m) for n, m in calls(emitted, ReshardModule) if any(not s.local for s in m.conversion.reshard.forward)
    )


def without_module(emitted: Emitted) -> None:
    delattr(emitted.graph_module, str(sending(emitted)[0].target))


def read_before(emitted: Emitted) -> None:
    node = sending(emitted)[0]
    next(reversed(emitted.graph_module.graph.nodes)).prepend(node)


def another_input(emitted: Emitted) -> None:
    graph = emitted.graph_module.graph
    with graph.inserting_before(next(iter(graph.nodes))):
        graph.placeholder("another")


def ended_twice(emitted: Emitted) -> None:
    node = calls(emitted, BucketEnd)[0][0]
    with emitted.graph_module.graph.inserting_after(node):
        emitted.graph_module.graph.call_module(str(node.target), node.args)


def another_group(emitted: Emitted) -> None:
    module = sending(emitted)[1]
    steps = tuple(replace(one, group="elsewhere") if one.group else one for one in module.conversion.forward)
    module.conversion = replace(module.conversion, forward=steps)


def backwards(emitted: Emitted) -> None:
    module = calls(emitted, LoweredOpModule)[0][1]
    (ring,) = module.sends
    module.sends = (replace(ring, place=1 - ring.place),)


def unread(emitted: Emitted) -> None:
    node = sending(emitted)[0]
    with emitted.graph_module.graph.inserting_after(node):
        emitted.graph_module.graph.call_module(str(node.target), node.args)


def left_out(emitted: Emitted) -> None:
    node = sending(emitted)[0]
    node.replace_all_uses_with(node.all_input_nodes[0])
    emitted.graph_module.graph.erase_node(node)


def another_shape(emitted: Emitted) -> None:
    node = next(one for one in emitted.graph_module.graph.nodes if SHARD in one.meta and one.meta[SHARD][1].axes)
    name, _ = node.meta[SHARD]
    node.meta[SHARD] = name, Sharding.replicated(atoms_of(planned()[0].tensors[name]))


BROKEN: dict[str, Callable[[Emitted], Emitted | None]] = {
    "modules": without_module,
    "one producer": read_before,
    "inputs": another_input,
    "outputs": lambda emitted: replace(emitted, results=()),
    "buckets": ended_twice,
    "groups": another_group,
    "rings": backwards,
    "no dead collective": unread,
    "reshards": left_out,
    "local shapes": another_shape,
}


def test_what_is_emitted_keeps_all() -> None:
    check(lambda emitted: None)
    check(lambda emitted: None, RING)


def test_each_invariant_is_broken_below() -> None:
    assert list(BROKEN) == [row.name for row in EMITTED_INVARIANTS]


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_found(name: str) -> None:
    with pytest.raises(InvariantError) as error:
        check(BROKEN[name], RING if name == "rings" else HEADS)
    assert error.value.invariant == name, error.value
