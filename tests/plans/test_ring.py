"""Ring attention in plans: its price against the formula, its text, its counts, where a search takes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar.cost.lowered_step import lower_step
from autopar.cost.network import Network
from autopar.cost.overlap import OverlapCost
from autopar.cost.profile import op_seconds
from autopar.errors import LayoutError
from autopar.plans.plan import Plan

HEADS, GROUPS, WIDTH = 32, 8, 128


class Attention(nn.Module):
    """Attention of the sizes of Llama-3-8B; `dropout` and `biased` are for what a ring refuses."""

    def __init__(self, dropout: float = 0.0, biased: bool = False) -> None:
        super().__init__()
        self.q, self.o = (nn.Linear(HEADS * WIDTH, HEADS * WIDTH, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(HEADS * WIDTH, GROUPS * WIDTH, bias=False) for _ in range(2))
        self.dropout = dropout
        self.bias = nn.Parameter(torch.empty(64, 64)) if biased else None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=self.bias, is_causal=self.bias is None, dropout_p=self.dropout, enable_gqa=True
        )
        return self.o(mixed.transpose(1, 2).flatten(2))


def plan_of(
    rows: int, mesh: str, layout: str | None, batch: int = 1, memory: str | None = None, seconds: float = 2, **made: Any
) -> Plan:
    with torch.device("meta"):
        model = Attention(**made).bfloat16()
        inputs = (torch.empty(batch, rows, HEADS * WIDTH, dtype=torch.bfloat16),)
    return autopar.plan(
        model, mesh, inputs, layout=layout, cluster="h100", memory=memory, cache=False, time_limit=seconds
    )


RING = "op @/folded_attention[s -> cp, t -> cp]"


@pytest.mark.parametrize(("rows", "mesh"), [(8192, "cp=8"), (131072, "cp=64")])
def test_the_price_is_that_of_the_schedule(rows: int, mesh: str) -> None:
    plan = plan_of(rows, mesh, f"fold seq; seq -> cp; {RING}; * -> none")
    count = int(mesh.partition("=")[2])
    step = lower_step(plan.graph, plan.decided)
    ring = [one for one in plan.costs.communication if one.kind == "ring_pass"]
    assert [one.direction for one in ring] == ["forward", "backward"]
    hop_bytes = 2 * rows // count * GROUPS * WIDTH * 2
    assert [one.bytes for one in ring] == [(count - 1) * hop_bytes, 2 * (count - 1) * hop_bytes]
    # c + (p - 1) max(c, x), written as p c and what is exposed of the hops.
    network, overlap = Network(plan.cluster, plan.decided.mesh), OverlapCost.of(plan.cluster)
    hop = network.seconds("send", ("cp",), hop_bytes)
    work = step_work(plan)
    own, every = rows // count, rows * rows // 2 / count
    first = own * (own + 1) / 2 / every
    shares = [first, *[(1 - first) / (count - 1)] * (count - 1)]
    exposed = sum(overlap.seconds(hop, share * work[0]) for share in shares[:-1])
    assert ring[0].seconds == pytest.approx(exposed, rel=1e-3)
    sent = [hop, hop, *[2 * hop] * (count - 3), hop]
    back = sum(overlap.seconds(one, share * work[1]) for one, share in zip(sent, shares, strict=True)) + hop
    assert ring[1].seconds == pytest.approx(back, rel=1e-3)
    # Every price of the op counts them.
    name = next(node.name for node in step.graph.nodes if node.attention is not None)
    assert op_seconds(step, plan.cluster)[name] == pytest.approx(sum(work) + exposed + back, rel=1e-3)


def step_work(plan: Plan) -> tuple[float, float]:
    """Return the seconds of the kernels of attention, forward and backward, from the events of a step."""
    name = next(node.name for node in plan.graph.nodes if node.attention is not None)
    events = autopar.timeline(plan.graph, plan.decided, plan.cluster).events
    seconds = {one.task.direction: one.task.seconds for one in events if one.task.name == name and not one.task.sends}
    return seconds["forward"], seconds["backward"]


def test_a_time_line_has_what_is_exposed() -> None:
    plan = plan_of(131072, "cp=64", f"fold seq; seq -> cp; {RING}; * -> none")
    events = autopar.timeline(plan.graph, plan.decided, plan.cluster).events
    found = sum(one.task.seconds for one in events if one.task.kind == "ring_pass")
    assert found == pytest.approx(sum(one.seconds for one in plan.costs.communication if one.kind == "ring_pass"))


def test_text_and_counts() -> None:
    plan = plan_of(4096, "cp=4", f"fold seq; seq -> cp; {RING}; * -> none")
    assert "op @/folded_attention[s -> cp, t.1 -> cp]" in plan.text
    assert Plan.read(plan.text, plan.graph).text == plan.text
    sent = [one for one in plan.collectives if one.kind == "ring_pass"]
    assert [(one.direction, one.axes) for one in sent] == [("forward", ("cp",)), ("backward", ("cp",))]
    assert "ring_pass(cp)" in plan.summary()
    assert "choice  s -> cp, t.1 -> cp" in str(plan.explain("/folded_attention"))


@pytest.mark.slow
def test_a_ring_takes_less_memory_than_a_gather() -> None:
    rows, count = 65536, 16
    ring, gather = (
        plan_of(rows, f"cp={count}", f"fold seq; seq -> cp; op @/folded_attention[{pin}]; * -> none")
        for pin in ("s -> cp, t -> cp", "s -> cp")
    )
    keys = 2 * rows * GROUPS * WIDTH * 2
    saved = gather.costs.memory.peak_bytes - ring.costs.memory.peak_bytes
    assert saved > (count - 6) / count * keys


@pytest.mark.slow
def test_a_search_takes_a_ring_where_memory_is_short() -> None:
    """A hop over one NIC takes longer than the products, so a gather is faster while it fits."""
    rows, mesh = 131072, "cp=16"
    ring, gather = (
        plan_of(rows, mesh, f"fold seq; op @/folded_attention[{pin}]") for pin in ("s -> cp, t -> cp", "s -> cp")
    )
    assert gather.step_seconds < ring.step_seconds
    between = (gather.memory_bytes + ring.memory_bytes) // 2
    for memory, way, other in ((None, "s -> cp", gather), (f"{between / 2**30} GiB", "s -> cp, t.1 -> cp", ring)):
        found = plan_of(rows, mesh, "fold seq", memory=memory, seconds=30)
        node = next(one for one in found.graph.nodes if one.attention)
        assert str(found.decided.assignment.ops[node.name].choice) == way
        assert found.step_seconds <= 1.001 * other.step_seconds


@pytest.mark.slow
def test_a_contract_forbids_a_ring() -> None:
    layout = "fold seq; op @/folded_attention[h -> tp, s -> cp, t -> cp]; forbid ring_pass(act) over cp"
    with pytest.raises(LayoutError, match="forbid ring_pass over cp is broken by the ring_pass over cp"):
        plan_of(8192, "cp=8,tp=8", layout)
    free = plan_of(131072, "cp=8,tp=8", "fold seq; forbid ring_pass(act) over cp")
    assert all(one.kind != "ring_pass" or "cp" not in one.axes for one in free.collectives)


PLAIN = "op @/scaled_dot_product_attention"


@pytest.mark.parametrize(
    ("pin", "made", "fix"),
    [
        ("t -> cp", {}, "an axis that splits the keys splits the rows too: write 's -> cp' as well"),
        ("s -> cp, t -> cp", {"dropout": 0.1}, "without dropout: disable it, or leave out 't'"),
        ("s -> cp, t -> cp", {"biased": True}, "the mask bias has a gradient, which only whole keys give"),
    ],
)
def test_a_ring_that_cannot_be(pin: str, made: dict[str, Any], fix: str) -> None:
    with pytest.raises(LayoutError, match="E5") as error:
        plan_of(64, "cp=2", f"fold seq none; {PLAIN}[{pin}]; * -> none", **made)
    assert fix in str(error.value)
