"""What the summary says of dims, of parts of dims, and of where the gap counts from."""

from __future__ import annotations

import torch

from autopar.ir.values import Atom, NamedTensor
from autopar.mesh import Mesh
from autopar.plans.find import PlanRequest, plan_graph, plan_under_layout
from autopar.plans.format import layout_text, repeated_names
from autopar.plans.plan import Plan
from autopar.sharding.sharding import Sharding
from autopar.tracing.trace import trace
from examples.mlp import mlp


def test_a_dim_of_several_places_has_one_row_and_the_usual_place_first() -> None:
    graph = trace(*mlp(), dims={"x": "batch features"})
    text = "batch -> dp; d_ff -> tp; param, grad, opt { d_ff -> dp*tp }; * -> none"
    plan = plan_under_layout(graph, Mesh("dp=2,tp=2"), text, PlanRequest("h100"), "layout")
    rows = [line.split() for line in plan.summary().partition("\ndims\n")[2].partition("\n\n")[0].splitlines()]
    assert ["batch", "->", "dp"] in rows
    assert [row for row in rows if "d_ff" in row] == [["d_ff", "->", "dp*tp,", "or", "tp"]], (
        "six parameters, four values"
    )


def test_tensors_of_layers_that_are_not_quite_equal_are_one_row() -> None:
    """Three residual linears with another function after each: no layers repeat."""

    class Layers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.layers[0](x).relu()
            x = x + self.layers[1](x).tanh()
            out: torch.Tensor = x + self.layers[2](x).exp()
            return out

    graph = trace(Layers(), (torch.randn(4, 8),), dims={"x": "batch features"})
    assert not graph.repeats
    plan = plan_under_layout(graph, Mesh("dp=2"), "batch -> dp; * -> none", PlanRequest("h100"), "layout")
    rows = [line.split("  ") for line in plan.summary().partition("\ntensors\n")[2].partition("\n\n")[0].splitlines()]
    assert [row[1] for row in rows if "bias" in row[1]] == ["layers.*.bias (×3)"]


def test_a_part_of_a_dim_says_of_which() -> None:
    atoms = (Atom(0, 8, ("heads", "kv_heads")), Atom(0, 4, ("heads", "group")), Atom(0, 16, ("head_dim",)))
    layout = Sharding((("tp",), (), ()))
    weight = NamedTensor("q.weight", "param", ("(heads head_dim)",), (512,), torch.float32, "q", atoms)
    assert layout_text(weight, layout) == "kv_heads of heads -> tp"
    inside = NamedTensor("q.weight", "param", ("((kv_heads group) head_dim)",), (512,), torch.float32, "q", atoms)
    assert layout_text(inside, layout) == "kv_heads -> tp"


def test_the_gap_under_a_layout_is_told_as_such_and_kept() -> None:
    graph = trace(*mlp(), dims={"x": "batch features"})
    asked = PlanRequest("h100", time_limit=5, cache=False)
    free = plan_graph(graph, (Mesh("dp=2"),), None, asked)
    bound = plan_graph(graph, (Mesh("dp=2"),), "batch -> dp; * -> ?", asked)
    assert "from the best plan, from" in free.summary()
    assert "from the best plan within the layout, from" in bound.summary()
    assert "from the best plan within the layout, as its file claims" in Plan.read(bound.text, graph).summary()


def test_what_stands_at_one_place_of_all_layers_is_alike() -> None:
    graph = trace(*mlp())
    assert repeated_names(graph, "down.1.weight") == ("down.0.weight", "down.1.weight")
    assert repeated_names(graph, "x") == ("x",)


def test_micro_batches_are_told() -> None:
    graph = trace(*mlp(), dims={"x": "batch features"})
    line = "the batch runs as 3 micro-batches, one after the other"
    for text, is_told in (("micro 3; ddp", True), ("ddp", False)):
        plan = plan_under_layout(graph, Mesh("dp=2"), text, PlanRequest("h100"), "layout")
        assert (line in plan.summary()) == is_told
