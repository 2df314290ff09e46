"""What else a tensor or an op could do: one change, the rest as it is, priced as any other plan."""

from __future__ import annotations

import pytest

from autopar.ir.graph import NamedGraph
from autopar.mesh import Mesh
from autopar.plans.find import PlanRequest, plan_under_layout
from autopar.plans.plan import Plan
from autopar.plans.to_layout import choice_words
from autopar.plans.views.alternatives import alternatives, forced, shown
from autopar.sharding.layout.language import Layout, parse_layout
from autopar.sharding.layout.resolve import resolve
from autopar.sharding.layout.syntax import Block, OpPin, Pin
from examples.gpt import gpt
from tests.traced import traced

MESH = Mesh("dp=2,tp=2")
LAYOUTS = ("megatron_sp", "fsdp_tp(fsdp=dp)")
NAMES = ("tokens.weight", "blocks.0.up.weight", "blocks.0.up/linear", "blocks.0/add", "ids")


@pytest.fixture(scope="module")
def graph() -> NamedGraph:
    return traced(gpt, batch=8, heads=4, d_model=32, seq=12)


@pytest.fixture(scope="module", params=LAYOUTS)
def plan(request: pytest.FixtureRequest, graph: NamedGraph) -> Plan:
    return plan_under_layout(graph, MESH, request.param, PlanRequest("local-cpu"))


def test_each_is_a_plan_with_that_change_and_no_other(plan: Plan) -> None:
    graph, known = plan.graph, plan.decided.assignment
    for name in NAMES:
        found = alternatives(plan, name)
        assert found, name
        for one in found:
            assert one.plan is not None, one
            assignment = one.plan.decided.assignment
            assert one.plan.decided != plan.decided
            (line,) = parse_layout(one.change)
            touched = {node.name for node in graph.nodes if name in (node.name, *node.operands, *node.outputs)}
            others = [other for other in graph.tensors if other != name and other in known.values]
            if isinstance(line, OpPin):
                node = next(node for node in graph.nodes if node.name == name)
                assert choice_words(node, assignment.ops[name].choice, MESH.axes)[0] == line.choice  # type: ignore[arg-type]
                others = [other for other in graph.tensors if other in known.values]
            elif isinstance(line, Pin):
                splits = resolve(Layout((line,)), graph.tensors[name], "use", plan.decided.axes)
                assert assignment.values[name].splits == splits
                assert one.plan.layout_of(name).splits == splits
            else:
                assert isinstance(line, Block)
                assert assignment.values[name] == known.values[name], "its use stays"
                assert assignment.ops == known.ops
            assert all(assignment.values[other].splits == known.values[other].splits for other in others)
            assert all(assignment.ops[op] == known.ops[op] for op in known.ops if op not in touched)


def test_each_can_be_written_and_read(graph: NamedGraph) -> None:
    plan = plan_under_layout(graph, MESH, "megatron", PlanRequest("local-cpu"))
    for name in ("blocks.0.up.weight", "blocks.0.up/linear"):
        for one in alternatives(plan, name):
            assert one.plan is not None
            again = Plan.read(one.plan.text, graph)
            assert again.step_seconds == one.plan.step_seconds
            assert again.layout_of(name) == one.plan.layout_of(name)


def test_they_are_the_same_each_time_and_the_fastest_comes_first(plan: Plan) -> None:
    found = alternatives(plan, "blocks.0.up.weight")
    assert [one.change for one in found] == [one.change for one in alternatives(plan, "blocks.0.up.weight")]
    times = [one.plan.step_seconds for one in found if one.plan is not None]
    assert times == sorted(times)
    assert len({one.change for one in found}) == len(found)


def test_what_an_expert_would_do_is_among_them(graph: NamedGraph) -> None:
    """Under Megatron's layout: to store a shard of a weight on each rank, as ZeRO-3 does, and to use it whole."""
    plan = plan_under_layout(graph, MESH, "megatron", PlanRequest("local-cpu"))
    found = {one.change: one.plan for one in alternatives(plan, "blocks.0.up.weight")}
    split = found["@blocks.0.up.weight[d_ff -> tp, d_model -> dp, * -> none]"]
    whole = found["@blocks.0.up.weight[* -> none]"]
    assert split is not None
    assert whole is not None
    assert split.memory_bytes < plan.memory_bytes < whole.memory_bytes
    sent = {(one.kind, one.axes) for one in split.collectives if one.tensor == "blocks.0.up.weight"}
    assert sent == {("all_gather", ("dp",)), ("reduce_scatter", ("dp",))}


def test_what_cannot_be_had_says_why(graph: NamedGraph) -> None:
    plan = plan_under_layout(graph, MESH, "megatron", PlanRequest("local-cpu"))
    (line,) = parse_layout("@tokens.weight[vocab -> dp*tp, * -> none]")
    assert isinstance(line, Pin)
    one = forced(plan, line)
    assert one.plan is None
    assert one.why.startswith("E4: the dim 'vocab' of tokens.weight")
    assert f"  {one.change} is infeasible: E4: " in shown(plan, (one,))


def test_nothing_can_be_split_otherwise(graph: NamedGraph) -> None:
    plan = plan_under_layout(graph, Mesh("dp=1"), "ddp", PlanRequest("local-cpu"))
    assert alternatives(plan, "blocks.0.up/linear") == ()
    assert shown(plan, ()) == "no alternatives: no other split is possible here"
