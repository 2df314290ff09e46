"""Arguments whose default depends on a shape: a shard must take the default of the whole tensor; on simulated ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.tracing.trace import trace
from tests.ranks import difference


class CrossOfRows(nn.Module):
    """`torch.cross` without a dim takes the first dim of length 3: of 6 rows that is the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cross(x @ self.weight, x)


@pytest.mark.filterwarnings("ignore:Using torch.cross without specifying the dim")
@pytest.mark.parametrize("rows", [6, 5, 9])
def test_a_cross_product_of_shards_of_three_rows_is_along_the_dim_of_the_whole(rows: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(rows, 3, dtype=torch.float64)
    graph = trace(CrossOfRows(), (x,), dims={"x": "batch space"})
    axes = {"dp": 3 if rows == 9 else 2}
    assert difference(graph, "batch -> dp pad; * -> none", axes, [x]) < 1e-12


class Repeated(nn.Module):
    """Each row four times, beside a dim that may be empty."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 2).repeat_interleave(4, 1).reshape(*x.shape[:2], 4, x.shape[2])


@pytest.mark.parametrize("columns", [0, 3])
def test_copies_beside_an_empty_dim_are_counted(columns: int) -> None:
    x = torch.randn(4, 6, columns, dtype=torch.float64)
    graph = trace(Repeated(), (x,), dims={"x": "batch rows columns"})
    assert difference(graph, "batch -> dp; * -> none", {"dp": 2}, [x]) == 0
    assert difference(graph, "rows -> dp; * -> none", {"dp": 2}, [x]) == 0
