"""Plans of experts with a fixed capacity: as a layout says, priced by their slots."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import LayoutError
from autopar.tracing.group_capacity import slots_of_capacity, with_capacity
from examples.gpt import gpt
from tests.runtime.test_routed_rows import EACH, EXPERTS, WIDTH, block

LAYOUT = "batch -> ep*dp; @*experts* { expert -> ep }; * -> none"
SAMPLES, SEQ = 8, 6


def plan(model: nn.Module, given: Any, layout: str) -> autopar.Plan:
    return autopar.plan(model, "ep=2,dp=2", given, layout=layout, cluster="h100", cache=False)


@pytest.fixture(scope="module")
def mixtral() -> tuple[nn.Module, Any]:
    model, x = block("Mixtral", "uneven")
    return model, (x.requires_grad_(),)


def test_slots() -> None:
    """At least one, at most the rows; no slot more by rounding: 1.1 * 80 / 8 is 11.000000000000002."""
    found = [slots_of_capacity(rows, 8, factor) for rows, factor in ((80, 1.1), (12, 1.0), (12, 0.1), (12, 9.0))]
    assert found == [11, 2, 1, 12]


def test_a_plan_says_it(mixtral: tuple[nn.Module, Any]) -> None:
    found = plan(*mixtral, f"capacity 1.25; {LAYOUT}")
    assert "\ncapacity 1.25\n" in found.text
    assert "note    an expert takes at most 1.25 times the mean of the rows of a sample" in found.summary()
    assert "implausible" not in found.summary()
    assert "rows go to their experts" not in found.summary(), "each rank has as many slots"
    assert found.to_json()["capacity"] == 1.25
    again = autopar.Plan.read(found.text, autopar.trace(*mixtral))
    assert again.text == found.text
    routed = plan(*mixtral, LAYOUT)
    assert "capacity" not in routed.text
    assert routed.to_json()["capacity"] is None
    assert plan(*mixtral, f"capacity none; {LAYOUT}").text == routed.text


@pytest.mark.parametrize("factor", [1.25, 2.0, 4.0])
def test_flops_are_those_of_the_slots(mixtral: tuple[nn.Module, Any], factor: float) -> None:
    """Forward and twice as many backward, of up (two halves) and down; of all ranks."""
    slots = slots_of_capacity(SEQ * EACH, EXPERTS, factor)
    other = plan(*mixtral, f"capacity {float(EXPERTS)}; {LAYOUT}")
    found = plan(*mixtral, f"capacity {factor}; {LAYOUT}")
    more = SAMPLES * EXPERTS * (SEQ * EACH - slots) * 2 * WIDTH * (80 + 40) * 3
    assert other.costs.flops - found.costs.flops == more


def test_rows_are_exchanged_in_equal_parts(mixtral: tuple[nn.Module, Any]) -> None:
    """Each rank of ep=4 sends slots of its samples to the experts of three others: no counts, no imbalance."""
    layout = "capacity 2; batch -> ep; @*experts* { expert -> ep }; * -> none"
    found = autopar.plan(mixtral[0], "ep=4", mixtral[1], layout=layout, cluster="h100", cache=False)
    sent = [one for one in found.collectives if one.kind == "all_to_all"]
    slots = slots_of_capacity(SEQ * EACH, EXPERTS, 2.0)
    assert len(sent) == 4
    assert {one.bytes for one in sent} == {SAMPLES // 4 * EXPERTS * slots * WIDTH * 8}


def test_models_that_cannot_have_it(mixtral: tuple[nn.Module, Any]) -> None:
    model, given = gpt(layers=1, d_model=32, heads=2, vocab=64, seq=8, batch=4)
    with pytest.raises(LayoutError, match="E4: the model has no rows that go to experts\n"):
        plan(model, given, "capacity 2; * -> none")
    graph = with_capacity(autopar.trace(*mixtral), 2.0)
    assert with_capacity(graph, 2.0) is graph

    class Tokens(nn.Module):
        """Tokens without a dim of samples."""

        def __init__(self) -> None:
            super().__init__()
            self.experts, self.gate = mixtral[0].mlp.experts, mixtral[0].mlp.gate

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            _, weights, chosen = self.gate(x)
            return self.experts(x, chosen, weights).sum()

    with pytest.raises(LayoutError, match="E4: the rows of the experts have no dim of samples"):
        plan(Tokens(), (mixtral[1][0].detach().flatten(0, 1),), "capacity 2; * -> none")
