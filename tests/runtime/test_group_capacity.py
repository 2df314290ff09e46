"""Experts of a fixed capacity on different ranks, against one process in which dropped rows have no weight."""

from __future__ import annotations

import copy
from collections import Counter
from math import ceil
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import autopar
from examples.hf import hf
from tests.runtime.launcher import launch
from tests.runtime.sent import Counted
from tests.runtime.test_routed_rows import CONFIGS, EACH, EXACT, EXPERTS, block
from tests.runtime.training import gap, gradients, whole, worst

SAMPLES, SEQ = 8, 6
WAYS = {
    "a2a": "batch -> dp*ep; @*experts* { expert -> ep }",
    "select": "batch -> dp; @*experts* { expert -> ep }",
    "gather": "batch -> dp*ep",
}


def reference(model: nn.Module, factor: float) -> list[int]:
    """Let the experts of a model take their first rows of each sample; return the list that gets the dropped rows."""
    slots = ceil(factor * SEQ * EACH / EXPERTS)
    experts = model.mlp.experts
    forward, dropped = experts.forward, []

    def limited(rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        mask = torch.zeros(chosen.shape)
        for sample in range(SAMPLES):
            taken: Counter[int] = Counter()
            for token in range(sample * SEQ, (sample + 1) * SEQ):
                for place in range(EACH):
                    expert = int(chosen[token, place])
                    mask[token, place] = float(taken[expert] < slots)
                    taken[expert] += 1
        dropped.append(int((mask == 0).sum()))
        # Weights of some models have a place for each expert, others one for each choice.
        return forward(rows, chosen, weights * mask.to(weights.dtype))

    experts.forward = limited
    return dropped


class Seen(NamedTuple):
    """One step of one rank."""

    name: str
    loss_gap: float
    gradient_gap: float
    dropped: int
    exchanges: tuple[int, int]
    rows_left: tuple[Any, ...]


def step(name: str, mesh: str, way: str, routing: str, factor: float) -> Seen:
    model, x = block(name, routing)
    x.requires_grad_()
    parallel = autopar.parallelize(model, mesh, (x,), layout=f"capacity {factor:g}; {WAYS[way]}")
    with Counted() as forward:
        mine = parallel(x)
    with Counted() as backward:
        mine.backward()
    dropped = reference(model, factor)
    loss = model(x)
    loss.backward()
    kind = "all_to_all_single"
    return Seen(
        name,
        float((mine.detach() - loss.detach()).abs() / loss.detach().abs()),
        worst(gradients(parallel), gradients(model)),
        dropped[0],
        (forward.counts[kind], backward.counts[kind]),
        parallel.routed_loads(),
    )


CASES = (("uneven", 1.25), ("one", 1.25), ("uneven", float(EXPERTS)))


def steps(mesh: str, way: str) -> list[list[Seen]]:
    return [[step(name, mesh, way, *case) for name in CONFIGS] for case in CASES]


def check(found: list[Seen], way: str, factor: float) -> None:
    for one in found:
        assert one.loss_gap < 1e-9, one
        assert one.gradient_gap < EXACT[one.name], one
        # With a slot for each row nothing is dropped.
        assert (one.dropped > 0) == (factor < EXPERTS), one
        # Of rows two forward and two backward; no counts are sent. With a slot for each row fewer bytes are gathered.
        assert way != "a2a" or one.exchanges == ((2, 2) if factor < EXPERTS else (0, 0)), one
        assert one.rows_left == (), "no rows have a size that depends on data"


def test_capacity_on_two_ranks() -> None:
    for one in launch(step, "GptOss", "dp=1,ep=2", "a2a", "uneven", 1.0, ranks=2):
        check([one], "a2a", 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("mesh", "ranks"), [("dp=1,ep=2", 2), ("dp=1,ep=4", 4), ("dp=2,ep=2", 4)])
def test_capacity_of_all_models(way: str, mesh: str, ranks: int) -> None:
    for rank in launch(steps, mesh, way, ranks=ranks):
        for found, (_, factor) in zip(rank, CASES, strict=True):
            check(found, way, factor)


def folded() -> tuple[float, dict[str, tuple[float, float]]]:
    """A model with capacity in the plain order of the sequence and in the folded one; and how far drops change it."""
    torch.manual_seed(0)
    model, inputs = hf("mixtral", batch=4, seq=8, num_hidden_layers=2)
    model, inputs = model.double(), {**inputs, "labels": inputs["input_ids"]}
    experts = "@*experts* { expert -> cp }; * -> none"
    seen: dict[str, tuple[Tensor, dict[str, Tensor]]] = {}
    for layout in (
        "fold seq none; seq -> cp; * -> none",
        "capacity 1; fold seq none; seq -> cp; * -> none",
        f"capacity 1; fold seq; seq -> cp; {experts}",
        f"capacity 1; fold seq; batch -> cp; {experts}",
    ):
        parallel = autopar.parallelize(copy.deepcopy(model), "cp=2", inputs, layout=layout)
        loss: Any = whole(parallel(**inputs).loss)
        loss.backward()
        seen[layout] = loss.detach(), gradients(parallel)
    full, plain, *others = seen
    gaps = {one: (gap(seen[one][0], seen[plain][0]), worst(seen[one][1], seen[plain][1])) for one in others}
    return worst(seen[full][1], seen[plain][1]), gaps


@pytest.mark.slow
def test_a_fold_drops_the_same_rows() -> None:
    """Rows are taken in the order of the sequence, also where it is folded."""
    for dropped, gaps in launch(folded, ranks=2):
        assert dropped > 1e-3
        assert len(gaps) == 2
        for layout, (loss, gradient) in gaps.items():
            # The model adds its loss up in float32.
            assert loss < 1e-6, layout
            assert gradient < 1e-12, layout


def compiled(name: str) -> tuple[float, float, int]:
    """The gaps of a compiled step to an eager one, and the number of graphs."""
    model, x = block(name, "uneven")
    parallel = autopar.parallelize(model, "ep=2", (x,), layout=f"capacity 1.25; {WAYS['a2a'].replace('dp*', '')}")
    loss = parallel(x)
    loss.backward()
    expected = gradients(parallel)
    parallel.zero_grad()
    graphs = 0

    def count(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    fast: Any = torch.compile(parallel, backend=count)
    found = fast(x)
    found.backward()
    return float((found - loss).abs() / loss.abs()), worst(gradients(parallel), expected), graphs


@pytest.mark.slow
def test_one_compiled_graph() -> None:
    for loss_gap, gradient_gap, graphs in launch(compiled, "Mixtral", ranks=2):
        assert graphs == 1, "routed rows break the graph at each exchange, rows in slots do not"
        assert max(loss_gap, gradient_gap) < 1e-9
