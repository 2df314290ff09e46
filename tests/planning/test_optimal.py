"""Small graphs on random clusters: the plan that is found is the best of all that could be decided, by `evaluate`."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from math import prod

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.cost.cluster import Cluster, load_cluster
from autopar.cost.evaluate import evaluate
from autopar.layout.language import Layout, parse_layout
from autopar.planning.decode import plan_of
from autopar.planning.demands import Demands
from autopar.planning.errors import NoPlan
from autopar.planning.model import Model, build
from autopar.planning.setting import PlanOptions, Setting
from autopar.planning.solve import solve_plan
from autopar.tracing.graph import NamedGraph

H100 = load_cluster("h100")
MOST = 300
"""Assignments of a graph that are all priced."""


class Layers(nn.Module):
    """A few parameters and what is done with them."""

    def __init__(self, shapes: Sequence[Sequence[int]], function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(*shape, device="meta")) for shape in shapes)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.weights)


def rows(*shape: int) -> tuple[Tensor]:
    return (torch.empty(*shape, device="meta"),)


KINDS: dict[str, tuple[nn.Module, tuple[Tensor]]] = {
    "one product": (Layers([(64, 48)], lambda x, w: (x @ w).sum()), rows(32, 64)),
    "activation": (Layers([(64, 48)], lambda x, w: (x @ w).tanh()), rows(32, 64)),
    "scaled": (Layers([(96,)], lambda x, w: (x * w).sum()), rows(1024, 96)),
    "tied": (Layers([(64, 48)], lambda x, w: ((x @ w) @ w.T).sum()), rows(16, 64)),
    "shared value": (Layers([(64,)], lambda x, w: (x * w).sum() + (x * w).relu().sum()), rows(512, 64)),
}


@pytest.fixture(scope="module")
def graphs() -> dict[str, NamedGraph]:
    return {kind: autopar.trace(model, inputs) for kind, (model, inputs) in KINDS.items()}


def random_cluster(draw: random.Random) -> Cluster:
    """Faster or slower in all that counts, so that now the one and now the other is best."""
    device = replace(H100.device, launch_seconds=H100.device.launch_seconds * 10 ** draw.uniform(-4, 0))
    device = replace(device, host_seconds=device.host_seconds * 10 ** draw.uniform(-6, 0))
    library = replace(H100.library, overlap_fraction=draw.choice([0.0, 0.3, 1.0]))
    algorithms = tuple(
        replace(one, base_seconds=one.base_seconds * 10 ** draw.uniform(-5, 0), hop_seconds={})
        for one in library.algorithm
    )
    return replace(H100, device=device, library=replace(library, algorithm=algorithms))


def random_layout(draw: random.Random, graph: NamedGraph) -> Layout:
    """A line or two about some dims; most is left open."""
    names = sorted(graph.dims)
    lines = []
    for name in draw.sample(names, min(len(names), draw.randint(0, 2))):
        lines.append(
            f"{draw.choice(['param', 'use', 'act', 'input'])} {{ {name} -> {draw.choice(['a', 'none'])} | none }}"
        )
    return parse_layout("\n".join(lines)) if lines else Layout(())


def all_costs(model: Model, cluster: Cluster) -> list[tuple[float, float]]:
    """The seconds and the peak of every assignment."""
    found = []
    for chosen in product(*(range(len(variable.states)) for variable in model.variables)):
        costs = evaluate(model.setting.graph, plan_of(model, chosen), cluster)
        found.append((costs.step_seconds, costs.memory.peak_bytes))
    return found


def cases(graphs: dict[str, NamedGraph], seed: int) -> tuple[NamedGraph, Cluster, Layout, PlanOptions, Model]:
    draw = random.Random(seed)
    while True:
        graph = graphs[draw.choice(list(graphs))]
        cluster, layout = random_cluster(draw), random_layout(draw, graph)
        options = PlanOptions(
            micro_batches=draw.choice([1, 1, 3]), optimizer=draw.choice(["sgd", "adamw"]), compiled=draw.random() < 0.3
        )
        setting = Setting.of(graph, {"a": 2}, cluster, options)
        try:
            model = build(setting, Demands(graph, {"a": 2}, layout), regather=True)
        except autopar.AutoparError:
            continue
        if prod(len(variable.states) for variable in model.variables) <= MOST:
            return graph, cluster, layout, options, model


@pytest.mark.parametrize("block", range(10))
def test_what_is_found_is_the_best_of_all(graphs: dict[str, NamedGraph], block: int) -> None:
    """Without a limit on memory and under one that some of the assignments keep."""
    for seed in range(20 * block, 20 * block + 20):
        graph, cluster, layout, options, model = cases(graphs, seed)
        every = all_costs(model, cluster)
        for limit in (np.inf, random.Random(seed).choice(every)[1]):
            best = min(seconds for seconds, peak in every if peak <= limit)
            solved = solve_plan(
                graph,
                {"a": 2},
                cluster,
                layout=layout,
                options=options,
                memory_bytes=limit,
                experts=False,
                time_limit=120,
            )
            assert solved.costs.memory.peak_bytes <= limit
            assert solved.costs.step_seconds == pytest.approx(best, rel=1e-9), (seed, limit)
            assert solved.bound_seconds <= best * (1 + 1e-9), (seed, limit)


def test_what_cannot_fit_is_refused_with_the_least_that_would_do(graphs: dict[str, NamedGraph]) -> None:
    graph, cluster, layout, options, model = cases(graphs, 3)
    least = min(peak for _, peak in all_costs(model, cluster))
    with pytest.raises(NoPlan, match="no plan was found that fits") as refused:
        solve_plan(graph, {"a": 2}, cluster, layout=layout, options=options, memory_bytes=0.9 * least, experts=False)
    assert refused.value.least_bytes == least
