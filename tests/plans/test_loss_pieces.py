"""Plans with the loss in pieces: as a layout says, and where a search has too little memory for whole logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autopar
from autopar.errors import LayoutError
from autopar.plans.loss_pieces import LEAST_SHARE, pieces_that_pay
from autopar.solver.infeasible import NoFeasiblePlan
from autopar.tracing.loss_in_pieces import logits_bytes
from examples.gpt import gpt
from tests.tracing.test_loss_in_pieces import Model, inputs, merged


def plan(model: Any, given: Any, layout: str | None, **options: Any) -> autopar.Plan:
    return autopar.plan(model, "dp=2,tp=2", given, layout=layout, cluster="h100", cache=False, **options)


def test_a_plan_says_it() -> None:
    model, given = gpt(layers=1, d_model=64, heads=4, vocab=512, seq=32, batch=8)
    found = plan(model, given, "pieces 4; batch -> dp; vocab -> tp; * -> none")
    assert "\npieces 4\n" in found.text
    assert "the last layer and the loss in 4 pieces" in found.summary()
    assert found.to_json()["loss_pieces"] == 4
    again = autopar.Plan.read(found.text, autopar.trace(model, given))
    assert again.text == found.text
    whole = plan(model, given, "pieces none; batch -> dp; vocab -> tp; * -> none")
    assert "pieces" not in whole.text
    assert found.memory_bytes < whole.memory_bytes
    assert found.explain("/linear_cross_entropy").count("v -> tp") == 1


def test_returned_logits() -> None:
    model, given = Model(merged, returns=True), inputs()
    with pytest.raises(LayoutError, match="E4: the model returns its logits") as error:
        plan(model, given, "pieces 4; * -> none")
    assert 'fix: outputs="loss"' in str(error.value)
    assert "\npieces 4\n" in plan(model, given, "pieces 4; * -> none", outputs="loss").text


@pytest.fixture(scope="module")
def large() -> tuple[Any, Any]:
    """A model whose logits are most of its memory."""
    with torch.device("meta"):
        return gpt(layers=1, d_model=256, heads=4, vocab=65536, seq=1024, batch=16)


@pytest.mark.slow
def test_a_search_takes_pieces_where_memory_asks_for_it(large: tuple[Any, Any]) -> None:
    logits = logits_bytes(autopar.trace(*large)) / 4
    found = {}
    for limit in (40e9, 1.5 * logits):
        found[limit] = plan(*large, None, memory=limit, time_limit=8)
        assert found[limit].fits
    roomy, tight = found.values()
    assert "pieces" not in roomy.text
    assert "\npieces " in tight.text
    # Whole logits do not fit.
    assert roomy.memory_bytes > 1.5 * logits
    with pytest.raises(NoFeasiblePlan):
        plan(*large, "pieces none; micro 1", memory=1.5 * logits, time_limit=8)


def test_small_logits_are_not_tried(large: tuple[Any, Any]) -> None:
    graph = autopar.trace(*large)
    share = logits_bytes(graph) / 4 / LEAST_SHARE
    assert pieces_that_pay(graph, 4, 1.01 * share, "sharded") is None
    found = pieces_that_pay(graph, 4, 0.99 * share, "sharded")
    assert found is not None
    # Logits of a piece are a 128th of the limit at most.
    assert found.loss_pieces == 4
    assert pieces_that_pay(found, 4, 0.0, "sharded") is None
