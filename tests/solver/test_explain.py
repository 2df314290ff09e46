"""Why no plan can be had: the smallest set of lines that conflict, with each other or with the limit on memory."""

from __future__ import annotations

import random
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.cost.hardware.cluster import load_cluster
from autopar.errors import LayoutError
from autopar.ir.graph import NamedGraph
from autopar.sharding.layout.language import parse_layout
from autopar.sharding.layout.syntax import COLLECTIVES
from autopar.sharding.options import TrainingOptions
from autopar.solver import explain_infeasible
from autopar.solver.infeasible import NoFeasiblePlan
from autopar.solver.solve import SolvedPlan, solve_plan
from examples.gpt import gpt
from examples.resnet import resnet
from tests.runtime.combined_models import MODELS, SEQ, batch_of

CLUSTER = load_cluster("h100")


@pytest.fixture(scope="module")
def graph() -> NamedGraph:
    model, inputs = gpt(batch=4, seq=8, d_model=16, heads=2, vocab=16, layers=2)
    return autopar.trace(model, inputs)


def asked(graph: NamedGraph, lines: list[str], memory: float | None = None, ranks: int = 2) -> SolvedPlan:
    layout = parse_layout("\n".join(lines))
    return solve_plan(graph, {"dp": ranks}, CLUSTER, layout=layout, memory_bytes=memory, time_limit=3600)


def shown(error: Exception) -> list[int]:
    """The numbers of the lines that an error shows."""
    places = [line.split("|")[0].strip() for line in str(error).splitlines() if line.strip().startswith("<layout>")]
    return [int(place.removeprefix("<layout>:")) for place in places]


def is_smallest(graph: NamedGraph, lines: list[str], numbers: list[int], memory: float | None, ranks: int) -> bool:
    """Whether these lines cannot be had, and can without any one of them."""
    conflict = [lines[number - 1] for number in numbers]
    with pytest.raises((LayoutError, NoFeasiblePlan)):
        asked(graph, conflict, memory, ranks)
    return all(asked(graph, [*conflict[:i], *conflict[i + 1 :]], memory, ranks) for i in range(len(conflict)))


def test_guards_that_conflict_with_other_lines_are_told_and_no_others(graph: NamedGraph) -> None:
    """A split input and a whole loss, and nothing may be sent."""
    guards = [f"forbid {one}({kind}) over dp" for one in COLLECTIVES for kind in ("act", "output", "input")]
    lines = ["vocab -> none", "input { batch -> dp }", *guards]
    with pytest.raises(LayoutError) as refused:
        asked(graph, lines)
    assert refused.value.code == "E7"
    assert "these lines cannot all be had; without any one of them, the others can" in str(refused.value)
    assert "in the plan that comes closest, forbid all_gather over dp is broken by the all_gather" in str(refused.value)
    numbers = shown(refused.value)
    assert 2 in numbers
    assert 1 not in numbers
    assert is_smallest(graph, lines, numbers, None, 2)


def test_tensors_that_cannot_share_a_layout_are_told_with_the_lines_that_say_otherwise(graph: NamedGraph) -> None:
    one, other = "blocks.0.up.weight", "blocks.1.up.weight"
    lines = [
        "batch -> dp",
        f"@{one}[d_ff -> dp]",
        f"@{other}[d_ff -> none]",
        f"same @{one} @{other}",
        "forbid all_to_all(act) over dp",
    ]
    with pytest.raises(LayoutError, match="are to share one layout, but") as refused:
        asked(graph, lines)
    assert shown(refused.value) == [2, 3, 4]


def test_a_limit_on_halos_is_told_with_the_line_that_passes_it() -> None:
    model, inputs = resnet(depth=18, width=8, image=32, batch=1, device="meta")
    graph = autopar.trace(model, inputs)
    node = next(node for node in graph.nodes if node.op.startswith("aten.conv2d") and "halo" in str(node.rule))
    factor = str(node.rule).split("halo ")[1].split()[0]
    lines = ["batch -> none", "limit halo 0.1%", f"op @{node.name}[{factor} -> dp]", "width -> none"]
    with pytest.raises(LayoutError, match=r"gets .* of a shard's extent from its neighbours") as refused:
        asked(graph, lines)
    assert shown(refused.value) == [2, 3]


@pytest.mark.slow
def test_lines_that_conflict_with_the_limit_on_memory_are_told_and_no_others(graph: NamedGraph) -> None:
    lines = ["batch -> dp", "opt { * -> none }", "seq -> none", "forbid all_to_all(act) over dp"]
    free = solve_plan(graph, {"dp": 4}, CLUSTER, time_limit=3600)
    limit = 0.4 * free.costs.memory.peak_bytes
    with pytest.raises(NoFeasiblePlan, match="this line is to blame, and without it the others fit") as refused:
        asked(graph, lines, limit, 4)
    assert shown(refused.value) == [2]
    assert is_smallest(graph, lines, [2], limit, 4)
    assert refused.value.least_bytes is not None
    assert asked(graph, lines, refused.value.least_bytes, 4).costs.memory.peak_bytes <= refused.value.least_bytes


def test_no_more_than_the_search_took_is_spent_on_lines_to_blame(graph: NamedGraph) -> None:
    """On many axes the model without the layout takes minutes to build."""
    free = solve_plan(graph, {"dp": 4}, CLUSTER, time_limit=3600)
    layout, limit = parse_layout("batch -> dp; opt { * -> none }"), 0.4 * free.costs.memory.peak_bytes
    with (
        mock.patch.object(explain_infeasible, "LEAST_SECONDS", 0.0),
        pytest.raises(NoFeasiblePlan, match=r"that was found takes [^;]*KiB\nfix"),
    ):
        solve_plan(graph, {"dp": 4}, CLUSTER, layout=layout, memory_bytes=limit, time_limit=1e-6)


@pytest.mark.slow
def test_contracts_that_can_be_kept_with_more_memory_are_not_blamed_for_one_another(graph: NamedGraph) -> None:
    """What fits breaks the guard, and what keeps it does not fit: it is the limit that both conflict with."""
    lines = ["seq -> none", "use { * -> none }", "forbid all_gather(param) over dp"]
    with pytest.raises(NoFeasiblePlan) as refused:
        asked(graph, lines, 1000, 4)
    assert refused.value.least_bytes is not None
    limit = 0.999 * refused.value.least_bytes
    assert solve_plan(graph, {"dp": 4}, CLUSTER, memory_bytes=limit, time_limit=3600).costs.memory.peak_bytes <= limit
    with pytest.raises(NoFeasiblePlan, match="no plan was found that fits in") as refused:
        asked(graph, lines, limit, 4)
    assert refused.value.least_bytes is not None
    assert refused.value.least_bytes > limit, "what breaks a guard is not what would do"
    numbers = shown(refused.value)
    assert numbers == [2, 3]
    assert is_smallest(graph, lines, numbers, limit, 4)


def test_a_layout_that_some_meshes_cannot_have_is_planned_on_the_others() -> None:
    """Two heads are not split by eight or four."""
    model, inputs = gpt(batch=4, seq=8, d_model=16, heads=2, vocab=16, layers=1)
    found = autopar.plan(model, "?", inputs, devices=8, layout="heads -> tp", cluster="h100", cache=False)
    assert found.mesh.axes["tp"] in (1, 2)
    with pytest.raises(LayoutError, match="there is no axis 'tq'"):
        autopar.plan(model, "?", inputs, devices=8, layout="heads -> tq", cluster="h100", cache=False)


@pytest.mark.slow
def test_the_line_that_sets_a_limit_on_memory_is_shown() -> None:
    model, inputs = gpt(batch=4, seq=8, d_model=16, heads=2, vocab=16, layers=1)
    layout = "batch -> dp\nlimit memory 1KiB\n"
    with pytest.raises(NoFeasiblePlan, match=r"no plan was found that fits in 1\.00 KiB") as refused:
        autopar.plan(model, "dp=2", inputs, layout=layout, cluster="h100", cache=False)
    assert shown(refused.value) == [2]
    assert str(refused.value).splitlines()[-1].startswith("fix: ")
    with pytest.raises(NoFeasiblePlan) as refused:
        autopar.plan(model, "dp=2", inputs, layout=layout, memory=512, cluster="h100", cache=False)
    assert shown(refused.value) == [], "it is not the layout that sets the limit"


@pytest.mark.slow
def test_of_many_meshes_the_one_that_comes_closest_is_told() -> None:
    model, inputs = gpt(batch=4, seq=8, d_model=16, heads=2, vocab=16, layers=1)
    alone = {}
    for mesh in ("dp=1,tp=2", "dp=2,tp=1"):
        with pytest.raises(NoFeasiblePlan) as refused:
            autopar.plan(model, mesh, inputs, memory=1024, cluster="h100", cache=False)
        alone[mesh] = refused.value.least_bytes
    with pytest.raises(NoFeasiblePlan, match=r"of 2 meshes, (.*) comes closest: no plan was found") as refused:
        autopar.plan(model, "?", inputs, devices=2, memory=1024, cluster="h100", cache=False)
    least = min(alone.values())
    assert refused.value.least_bytes == least
    assert any(f"of 2 meshes, {mesh} comes" in str(refused.value) for mesh in alone if alone[mesh] == least)


class ReturnsRows(nn.Module):
    """Model that returns what its layer makes beside a loss, or the loss alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 256)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.layer(x)
        return rows.square().mean(), rows


@pytest.mark.slow
def test_results_that_need_memory_are_told() -> None:
    """1,024 rows of 256 are 512 KiB on each of 2 devices; without them another fix has to do."""
    graph = autopar.trace(ReturnsRows(), (torch.empty(1024, 8),))

    def fix_of(options: TrainingOptions) -> str:
        with pytest.raises(NoFeasiblePlan) as refused:
            solve_plan(graph, {"dp": 2}, CLUSTER, memory_bytes=2**14, options=options, time_limit=3600)
        return str(refused.value).splitlines()[-1]

    assert "outputs='loss' leaves out the 512.00 KiB a device" in fix_of(TrainingOptions())
    assert fix_of(TrainingOptions(outputs="loss")) == "fix: more devices, a smaller batch, or more memory"


def test_rows_of_experts_that_would_have_to_be_gathered_are_told_with_their_lines() -> None:
    """The rows are split as the tokens are, and ops with a part of each expert take all of them."""
    torch.manual_seed(0)
    small = MODELS["mixtral"]
    graph = autopar.trace(small.make(), batch_of(small, random.Random(0), 4, SEQ, torch.float32))
    lines = ["heads -> none", "batch -> dp | none !10", "d_ff -> dp | none !1"]
    with pytest.raises(LayoutError) as refused:
        asked(graph, lines)
    assert refused.value.code == "E7"
    assert "experts/grouped takes model.layers.0.mlp.experts/dispatch" in str(refused.value)
    assert shown(refused.value) == [2, 3]
    assert is_smallest(graph, lines, [2, 3], None, 2)
