"""The time limit of a search where nothing fits: the search of all meshes, shapes and micro-batches keeps it."""

from __future__ import annotations

import time

import pytest

import autopar
from autopar.ir.graph import NamedGraph
from autopar.mesh import Mesh
from autopar.plans.find import PlanRequest, plan_graph
from autopar.solver.infeasible import NoFeasiblePlan
from examples.gpt import gpt

LIMIT, BEYOND = 6.0, 2.0
"""Times of a trace of the model, as a slow or a busy machine needs more time for the same search."""
LEAST = 20.0
"""MiB: less than the parameters of the model take on eight devices."""


def fresh_graph() -> NamedGraph:
    """Return a graph that no search has measured ops of: a shared one would make later searches quicker."""
    return autopar.trace(*gpt(layers=4, d_model=1024, heads=16, seq=512, batch=16, device="meta"))


@pytest.fixture(scope="module")
def of_trace() -> float:
    """Return the processor time of a trace, in seconds."""
    fresh_graph()
    began = time.process_time()
    fresh_graph()
    return time.process_time() - began


@pytest.mark.slow
@pytest.mark.parametrize(
    ("meshes", "layout", "any_mesh", "mib"),
    [
        (["dp=8", "dp=4,tp=2", "dp=2,tp=4", "tp=8"], None, True, LEAST),
        (["dp=8", "dp=4,tp=2", "dp=2,tp=4", "tp=8"], None, False, LEAST),
        (["pp=2,dp=4"], "pipeline pp 1f1b", False, LEAST),
        (["dp=4,tp=2"], "micro ?", False, LEAST),
        (["pod=2,dp=2,tp=2"], None, False, LEAST),
        # The parameters fit, and so do the estimates of some plans; the plan of least memory takes 243 MiB.
        (["dp=4,tp=2"], None, False, 150.0),
        (["dp=4,tp=2"], None, False, 190.0),
        (["dp=4,tp=2"], None, False, 230.0),
    ],
)
def test_the_limit_is_kept_where_nothing_fits(
    meshes: list[str],
    layout: str | None,
    any_mesh: bool,
    mib: float,
    of_trace: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In processor time, which other programs do not count into; the search has one thread."""
    graph = fresh_graph()
    request = PlanRequest("h100", mib * 2**20, time_limit=LIMIT * of_trace, cache=False, any_mesh=any_mesh)
    monkeypatch.setattr(time, "monotonic", time.process_time)
    began = time.process_time()
    with pytest.raises(NoFeasiblePlan, match=rf"no plan .*{mib:.2f} MiB"):
        plan_graph(graph, [Mesh(one) for one in meshes], layout, request)
    assert (time.process_time() - began) / of_trace < LIMIT + BEYOND


@pytest.mark.slow
def test_a_plan_that_fits_is_found_beyond_the_limit() -> None:
    graph = fresh_graph()
    for memory in (2.0 * 2**30, 0.4 * 2**30):
        request = PlanRequest("h100", memory, time_limit=0.2, cache=False)
        assert plan_graph(graph, [Mesh("dp=4,tp=2")], None, request).memory_bytes <= memory
