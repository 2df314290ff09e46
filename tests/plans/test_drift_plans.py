"""Plans of replicas that drift: text, prices, and that no search chooses them."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path

import jsonschema
import pytest

import autopar
from autopar.cli import main
from autopar.cost.hardware.cluster import Cluster, Device, Jitter, load_cluster
from autopar.errors import LayoutError
from autopar.ir.graph import NamedGraph
from autopar.mesh import Mesh, SubMesh
from autopar.plans.find import PlanRequest, plan_graph, plan_under_layout
from autopar.plans.plan import Plan
from autopar.plans.replicas import replica_graph
from autopar.plans.strategies import price_strategies
from autopar.sharding.options import TrainingOptions
from autopar.solver.published_strategies import strategy_plans
from autopar.solver.setting import PlanningProblem
from examples.gpt import gpt
from tests.traced import traced

H100 = load_cluster("h100")


@pytest.fixture(scope="module")
def graph() -> NamedGraph:
    return traced(gpt, batch=8)


def plan_of(graph: NamedGraph, layout: str, mesh: str = "pod=2,dp=2", cluster: Cluster = H100) -> Plan:
    return plan_under_layout(graph, Mesh(mesh), layout, PlanRequest(cluster))


LINES = (
    "drift pod -> mean every 16",
    "drift pod -> mean every 0 as bfloat16",
    "drift pod -> mean every 500, outer nesterov(0.7, 0.9), parts 4, late 5 as int8",
    "drift pod -> ring",
    "drift pod -> exponential every 2",
    "drift pod -> server(2)",
)


@pytest.mark.parametrize("line", LINES)
def test_a_plan_carries_the_line(graph: NamedGraph, line: str) -> None:
    plan = plan_of(graph, f"{line}; fsdp")
    assert plan.text.splitlines().count(line) == 1
    assert "mesh pod=2, dp=2" in plan.text.splitlines()
    assert plan.mesh == Mesh("dp=2")
    assert plan.graph.dims["batch"].size == 4
    again = Plan.read(plan.text, plan.graph)
    assert again.decided == plan.decided
    assert again.text == plan.text
    assert line in plan.summary()
    assert "meetings change what is learned" in plan.summary()
    assert plan.summary().startswith("GPT on pod=2,dp=2: 4 ×")
    assert plan.to_json()["drift"]["statement"] == line
    # Sizes of another batch are retargeted.
    other = Plan.read(plan.text, replica_graph(traced(gpt, batch=16), plan.decided.drift, "batch"))
    assert other.decided.drift == plan.decided.drift


def test_a_search_plans_one_replica(graph: NamedGraph) -> None:
    request = PlanRequest(H100, time_limit=5, cache=False)
    plan = plan_graph(graph, (Mesh("pod=2,dp=2"),), "drift pod -> mean every 16; batch -> ?; seq -> none", request)
    alone = plan_graph(traced(gpt, batch=4), (Mesh("dp=2"),), "batch -> ?; seq -> none", request)
    assert plan.decided.assignment == alone.decided.assignment
    assert plan.bound_seconds == alone.bound_seconds
    assert plan.step_seconds > alone.step_seconds


def test_replicas_of_one_rank(graph: NamedGraph) -> None:
    plan = plan_of(graph, "drift pod -> exponential; ddp", "pod=4")
    assert plan.mesh.size == 1
    assert plan.graph.dims["batch"].size == 2
    assert Plan.read(plan.text, plan.graph).decided == plan.decided


def test_no_search_takes_replicas(graph: NamedGraph) -> None:
    setting = PlanningProblem.of(graph, SubMesh.of({"pod": 2, "dp": 2}), H100, TrainingOptions())
    drifting = ("diloco", "gossip", "local_sgd", "parameter_server")
    assert not any(name.startswith(drifting) for name, _ in strategy_plans(setting))
    found = price_strategies(plan_of(graph, "ddp(dp=pod*dp)"))
    assert found
    assert not any(name.startswith(drifting) for name in found)
    # Strategies beside a plan of replicas are those of one replica, with the same meetings.
    plan = plan_of(graph, "drift pod -> mean every 16; fsdp")
    assert {one.decided.drift for one in price_strategies(plan).values()} == {plan.decided.drift}


def test_the_batch_must_divide(graph: NamedGraph) -> None:
    with pytest.raises(LayoutError, match="E4: batch=8 does not divide over the 3 replicas along pod"):
        plan_of(graph, "drift pod -> mean; ddp", "pod=3")


# -- prices ------------------------------------------------------------------------------------------------------------


def parameter_bytes(graph: NamedGraph) -> int:
    return sum(4 * prod(tensor.shape) for tensor in graph.parameters)


@pytest.mark.parametrize(
    ("line", "share"),
    [
        ("mean every 16", 2 * 3 / 4 / 16),
        ("mean every 16, outer nesterov(0.7, 0.9), parts 4", 2 * 3 / 4 / 16),
        ("mean every 0", 2 * 3 / 4),
        ("mean every 10 as bfloat16", 2 * 3 / 4 / 10 / 2),
        ("mean every 10 as int8", 2 * 3 / 4 / 10 * 65 / 256),
        ("mean every 10 as topk 5%", 3 / 10 * 2 * 0.05),
        ("ring", 2.0),
        ("exponential", 1.0),
        ("server(2)", 1 + 4 / 2),
    ],
)
def test_bytes_by_hand(graph: NamedGraph, line: str, share: float) -> None:
    found = plan_of(graph, f"drift pod -> {line}; ddp", "pod=4").costs.meetings
    assert found is not None
    assert found.sent_bytes == pytest.approx(share * parameter_bytes(graph), rel=1e-9)


def test_a_shard_of_a_replica_sends_its_part(graph: NamedGraph) -> None:
    whole, shards = (plan_of(graph, f"drift pod -> mean; {inner}").costs.meetings for inner in ("ddp", "fsdp"))
    assert whole is not None
    assert shards is not None
    assert shards.sent_bytes == pytest.approx(whole.sent_bytes / 2, rel=0.02)


def test_late_parts_overlap_with_training(graph: NamedGraph) -> None:
    """On a slow link: T steps of a replica are taken off each message."""
    slow = replace(H100, level=tuple(replace(one, achieved_bytes_per_second=1e6) for one in H100.level))
    times = {}
    for more in ("", ", parts 4", ", late 1", ", late 9"):
        costs = plan_of(graph, f"drift pod -> mean every 10{more}; ddp", "pod=4", slow).costs
        assert costs.meetings is not None
        times[more] = 10 * costs.meetings.sent_seconds, costs.step_seconds - costs.meetings.seconds
    (at_once, step), (late, _), (hidden, _) = times[""], times[", late 1"], times[", late 9"]
    assert late == pytest.approx(at_once - step)
    assert hidden == pytest.approx(max(0.0, at_once - 9 * step))
    assert at_once < times[", parts 4"][0] < 1.1 * at_once, "the hops of four messages"


def test_anchors_take_memory(graph: NamedGraph) -> None:
    size = parameter_bytes(graph)
    kept = {
        line: plan_of(graph, f"drift pod -> {line}; ddp", "pod=4").costs.memory.meetings_bytes / size
        for line in (
            "mean every 16",
            "mean every 16, outer sgd(0.7)",
            "mean every 16, outer nesterov(0.7, 0.9)",
            "mean every 16 as topk 5%",
            "server(2)",
        )
    }
    assert list(kept.values()) == [0, 1, 2, 2, 1.5]
    plain = plan_of(graph, "ddp", "dp=2").memory_bytes
    assert plan_of(graph, "drift pod -> mean, outer nesterov(0.7, 0.9); ddp").memory_bytes >= 2 * size
    assert plain > 0


@pytest.mark.slow
def test_replicas_on_unequal_devices() -> None:
    """All wait for the slowest replica; shares by speed let them end together."""
    model, inputs = gpt(layers=1, d_model=1024, heads=16, vocab=1024, seq=512, batch=256, device="meta")
    large, mixed = autopar.trace(model, inputs), load_cluster("h100-a100")
    request = PlanRequest(mixed, "100TiB")
    even, shared, little = (
        plan_under_layout(large, Mesh("pod=2,dp=4"), f"drift pod -> mean every 16{by}; ddp", request)
        for by in ("", ", by speed", ", by 5:3")
    )
    fast, slow = (autopar.evaluate(even.graph, even.decided, mixed.with_device(one)) for one in devices(mixed))
    assert even.step_seconds == slow.step_seconds > 1.5 * fast.step_seconds
    assert little.costs.meetings is not None
    # 5/8 of the batch on the fast replica take less time than 3/8 on the slow one.
    assert little.costs.meetings.late_seconds == pytest.approx(
        3 / 4 * slow.step_seconds - 5 / 4 * fast.step_seconds, rel=0.1
    )
    assert isinstance(shared.decided.drift.statement.by, tuple)
    assert shared.graph.dims["batch"].size > 160
    assert Plan.read(shared.text, shared.graph).text == shared.text
    ideal = (1 + slow.compute.seconds / fast.compute.seconds) / 2
    assert even.step_seconds / shared.step_seconds == pytest.approx(ideal, rel=0.05)
    assert ideal > 1.5
    # Nobody waits for pushes that nobody waits for.
    alone = plan_under_layout(large, Mesh("pod=8"), "drift pod -> exponential, stale any; ddp", request).costs.meetings
    assert alone is not None
    assert alone.late_seconds == 0


def devices(cluster: Cluster) -> tuple[Device, Device]:
    return cluster.part[0].device, cluster.device


def test_jitter_of_a_cluster(graph: NamedGraph) -> None:
    """Replicas that meet rarely wait less for ranks that are late at times than all ranks do in each step."""
    uneven = replace(H100, jitter=Jitter(share_fraction=1 / 8, by_seconds=0.05))
    one = plan_of(graph, "ddp(dp=pod)", "pod=4", uneven)
    other = plan_of(graph, "drift pod -> mean every 100; ddp", "pod=4", uneven)
    together, apart = one.costs.late_seconds, other.costs.late_seconds
    assert together == pytest.approx(0.05 * (1 - (7 / 8) ** 4), rel=0.01)
    assert 0.05 / 8 < apart < 0.5 * together
    assert "steps that end late, and waiting for them" in one.summary()
    steady = plan_of(graph, "ddp(dp=pod)", "pod=4")
    assert one.step_seconds - together == pytest.approx(steady.step_seconds)


def test_commands_take_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    root = Path(__file__).parents[2]
    target = f"{root}/examples/gpt.py:gpt"
    words = [target, "--set", "batch=8", "--mesh", "pod=2,dp=2", "--cluster", "h100", "--layout", "local_sgd"]
    assert main(["plan", *words, "--no-experts", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    schema = json.loads((root / "autopar/cli/schemas/plan.json").read_text())
    jsonschema.validate(data, schema)
    assert data["drift"]["statement"] == "drift pod -> mean every 16"
    assert data["mesh"] == {"dp": 2}
    assert main(["check", *words]) == 0
    assert "yes: step" in capsys.readouterr().out


@pytest.mark.slow
def test_verify_runs_one_replica(capsys: pytest.CaptureFixture[str]) -> None:
    root = Path(__file__).parents[2]
    words = [f"{root}/examples/gpt.py:gpt", "--mesh", "pod=16,dp=2", "--layout", "diloco", "--tolerance", "1e-10"]
    assert main(["verify", *words]) == 0
    out = capsys.readouterr().out
    assert "2 processes" in out
    assert "One replica was compared, on dp=2: meetings of replicas are no part of a call." in out
