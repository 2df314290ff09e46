"""The first rank plans, all ranks run that plan: found, given as an object, or read from a file."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from examples.gpt import gpt
from tests.gaps import number
from tests.runtime.launcher import in_turn, launch
from tests.runtime.training import error_of

TOLERANCE = 1e-5
SMALL: dict[str, Any] = {"layers": 1, "d_model": 24, "heads": 4, "vocab": 32, "seq": 6, "batch": 4}


def small(**changes: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    return gpt(**SMALL | changes)  # in float32: what a CPU takes for float64 is not known


def worst(parallel: Any, model: Any, inputs: Any) -> float:
    """The largest difference of the loss and of gradients."""
    for module in (parallel, model):
        module.zero_grad()
    own, wanted = parallel(**inputs), model(**inputs)
    own.backward()
    wanted.backward()
    found = [number((own - wanted).abs())]
    for name, parameter in model.named_parameters():
        gradient = parallel.get_parameter(name).grad.full_tensor()
        found.append(number((gradient - parameter.grad).abs().max()))
    return max(found)


def searched() -> dict[str, Any]:
    """No layout, and a layout with a hole; other sizes and modes are lowered from the plan."""
    model, inputs = small()
    _, longer = small(batch=5)
    found = {}
    for name, layout in (("nothing", None), ("a hole", "batch -> dp pad; d_ff -> ?; * -> none")):
        parallel = autopar.parallelize(model, "dp=2", inputs, layout=layout, time_limit=3)
        found[name] = worst(parallel, model, inputs)
        found[f"{name}, longer"] = worst(parallel, model, longer)
        with torch.no_grad():
            model.eval(), parallel.eval()
            found[f"{name}, eval"] = number((parallel(**inputs) - model(**inputs)).abs())
        model.train()
    stored = parallel.assignment.stored["tokens.weight"]
    return {**found, "stored": str(stored)}


def given(folder: str) -> dict[str, Any]:
    """A plan as an object and as a file."""
    model, inputs = small()
    from autopar.mesh import Mesh
    from autopar.plans.find import PlanRequest, plan_under_layout

    plan = plan_under_layout(autopar.trace(model, inputs), Mesh("tp=2"), "megatron", PlanRequest("local-cpu"))
    path = Path(folder, "gpt.plan.lay")
    if torch.distributed.get_rank() == 0:
        plan.save(path)
    torch.distributed.barrier()
    other, other_inputs = small(d_model=32)
    found: dict[str, Any] = {}
    for name, layout in (("object", plan), ("file", path)):
        parallel = autopar.parallelize(model, "tp=2", inputs, layout=layout)
        found[name] = worst(parallel, model, inputs)
        found[f"{name}, decisions"] = parallel.assignment == plan.decided.assignment
    found["another model"] = error_of(lambda: autopar.parallelize(other, "tp=2", other_inputs, layout=path))
    found["another mesh"] = error_of(lambda: autopar.parallelize(model, "dp=2", inputs, layout=path))
    return found


def everything(folder: str) -> dict[str, Any]:
    return in_turn((searched, ()), (given, (folder,)))


@pytest.fixture(scope="module")
def on_two() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        return launch(everything, folder, ranks=2)


def test_a_plan_that_is_searched_is_run_exactly(on_two: list[dict[str, Any]]) -> None:
    (first, other) = (one["searched"] for one in on_two)
    assert first["stored"] == other["stored"], "what the search has left open is the same on all ranks"
    for found in (first, other):
        assert max(off for name, off in found.items() if name != "stored") < TOLERANCE


def test_a_plan_that_is_given_is_run_as_it_says(on_two: list[dict[str, Any]]) -> None:
    for found in (one["given"] for one in on_two):
        assert max(found["object"], found["file"]) < TOLERANCE
        assert found["object, decisions"]
        assert found["file, decisions"]


def test_plans_for_something_else(on_two: list[dict[str, Any]]) -> None:
    for found in (one["given"] for one in on_two):
        assert "is the plan of another model: its GPT has other parameters" in found["another model"]
        assert "E1: the layout is for another mesh" in found["another mesh"]
