"""What a plan may hold: by default a share of a device, as not all that a device holds is predicted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autopar.cli import main
from autopar.cost.hardware.cluster import load_cluster
from autopar.mesh import Mesh
from autopar.plans.find import PlanRequest, plan_graph, plan_under_layout
from autopar.plans.plan import Plan
from autopar.sharding.layout.language import parse_layout
from autopar.solver.infeasible import NoFeasiblePlan
from examples.gpt import gpt
from tests.traced import traced

HAS = load_cluster("h100").device.memory_bytes


@pytest.mark.parametrize(
    ("memory", "layout", "share"),
    [
        (None, None, 0.9),
        ("100%", None, 1.0),
        ("95%", None, 0.95),
        (0.25 * HAS, None, 0.25),
        (None, "limit memory 50%", 0.5),
        (None, "limit memory 100%", 1.0),
        ("70%", "limit memory 100%", 0.7),
    ],
)
def test_the_limit(memory: str | float | None, layout: str | None, share: float) -> None:
    given = None if layout is None else parse_layout(layout)
    assert PlanRequest("h100", memory).limit_bytes(load_cluster("h100"), given) == int(share * HAS)


def test_words_and_text_say_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    graph = traced(gpt)
    usual = plan_under_layout(graph, Mesh("dp=2"), "ddp", PlanRequest("h100"))
    assert "of 67.06 GiB per device, 90 % of its memory: fits" in usual.summary()
    assert Plan.read(usual.text, graph).limit_bytes == usual.limit_bytes == int(0.9 * HAS)
    words = (f"{Path(__file__).parents[2]}/examples/gpt.py:gpt", "--mesh", "dp=2", "--cluster", "h100")
    assert main(["plan", *words, "--layout", "ddp", "--no-experts", "--memory", "100%"]) == 0
    assert "of 74.51 GiB per device, 100 % of its memory: fits" in capsys.readouterr().out


def test_what_only_the_whole_device_can_hold() -> None:
    """It is refused with the words that allow it."""
    graph, mesh = traced(gpt, layers=1), (Mesh("dp=2"),)
    cluster = load_cluster("h100")
    with pytest.raises(NoFeasiblePlan) as refused:
        plan_graph(graph, mesh, "micro 1; ddp", PlanRequest(cluster, 1000, cache=False, time_limit=60))
    least = refused.value.least_bytes
    assert least is not None
    assert "--memory" not in str(refused.value)
    tight = replace(cluster, device=replace(cluster.device, memory_bytes=1.02 * least))
    with pytest.raises(NoFeasiblePlan, match=r"a device has .*, and memory='100%', --memory 100%, plans for all of it"):
        plan_graph(graph, mesh, "micro 1; ddp", PlanRequest(tight, cache=False, time_limit=60))
    found = plan_graph(graph, mesh, "micro 1; ddp", PlanRequest(tight, "100%", cache=False, time_limit=60))
    assert least <= found.memory_bytes <= 1.02 * least


def test_what_micro_batches_take_is_said_too() -> None:
    graph, mesh = traced(gpt, layers=1), (Mesh("dp=2"),)
    least = []
    for layout in ("micro 1; ddp", "ddp"):
        with pytest.raises(NoFeasiblePlan) as refused:
            plan_graph(graph, mesh, layout, PlanRequest("h100", 1000, cache=False, time_limit=60))
        least.append((refused.value.least_bytes, "; in micro-batches it is " in str(refused.value)))
    (whole, _), (less, is_said) = least
    assert is_said
    assert less is not None
    assert whole is not None
    assert less < whole
