"""Parameters that are gathered: each is laid out in memory as in one process, which some kernels rely on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from autopar.lowering.modules.bucket_ends import BucketEnd
from autopar.tracing.trace import trace
from tests.ranks import difference

STORED = "* -> none; param { * -> a | none }"


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("ranks", [2, 3])
def test_batch_norm_of_one_channel_a_rank(ranks: int, training: bool) -> None:
    """Its backward on a CPU reads the weight as if it were contiguous: channel after channel."""
    torch.manual_seed(ranks)
    model = nn.Sequential(nn.Linear(4, ranks), nn.BatchNorm1d(ranks), nn.Linear(ranks, 4)).double()
    model.train(training)
    nn.init.normal_(model[1].weight)
    x = torch.randn(6, 4, dtype=torch.float64)
    graph = trace(model, (x,), dims={"input": "batch features"})
    assert difference(graph, STORED, {"a": ranks}, [x]) < 1e-9


class Shapes(nn.Module):
    """Parameters of many shapes, all of one bucket."""

    def __init__(self) -> None:
        super().__init__()
        shapes = ((2,), (2, 3), (4,), (2, 1, 3), (5,), (3, 2), (2, 2, 2), (1,), (0, 2))
        self.all = nn.ParameterList([nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in shapes])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * sum(functional.gelu(each).sum() for each in self.all)


@pytest.mark.parametrize("layout", [STORED, STORED.replace("a |", "a pad |")])
def test_what_is_gathered_is_contiguous(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[bool] = []
    run = BucketEnd.forward

    def watched(self: BucketEnd, started: Any) -> Any:
        given = run(self, started)
        found.extend(each.is_contiguous() for each in given)
        return given

    monkeypatch.setattr(BucketEnd, "forward", watched)
    torch.manual_seed(0)
    x = torch.randn(3, dtype=torch.float64)
    assert difference(trace(Shapes(), (x,)), layout, {"a": 2}, [x]) < 1e-12
    assert found
    assert all(found)


def test_what_is_gathered_again_is_so_on_a_rank_with_nothing() -> None:
    """Of five rows the last of four ranks has none: its backward gathers and reduces in the order of the others."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.GELU(), nn.Linear(8, 8, bias=False)).double()
    x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    layout = "batch -> a pad; * -> none; param, grad, opt { * -> a | none }; regather @*"
    assert difference(trace(model, (x,), dims={"input": "batch features"}), layout, {"a": 4}, [x]) < 1e-12
