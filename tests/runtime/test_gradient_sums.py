"""Sums of gradients: a backward on real ranks adds tensors of the sizes that are priced."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.cost.hardware.cluster import load_cluster
from autopar.cost.lowered_step import lower_step
from autopar.cost.profile import profile
from autopar.sharding.layout.language import choose_layout
from autopar.sharding.time_slice import propagate_plan
from tests.runtime.launcher import launch

WIDTH, ROWS = 32, 16


class Products(nn.Module):
    """Three products take one value, in front of a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.q = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        h = x.tanh()
        found: Tensor = (x + self.out(self.q(h) * self.k(h) * self.v(h))).square().mean()
        return found


class Scores(nn.Module):
    """One op takes a value twice: its rows and its columns."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        found: Tensor = torch.einsum("bik,bjk->bij", h, h).square().mean()
        return found


class _Added(TorchDispatchMode):
    """Numbers of elements of all sums of two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = Counter[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor) and isinstance(args[1], Tensor):
            self.sizes[found.numel()] += 1
        return found


def added(kind: type[nn.Module], layout: str) -> Counter[int]:
    torch.manual_seed(0)
    inputs = (torch.randn(4, ROWS, WIDTH),)
    parallel = autopar.parallelize(kind(), "tp=2", inputs, layout=layout)
    loss = parallel(*inputs)
    with _Added() as found:
        loss.backward()
    return found.sizes


def priced(kind: type[nn.Module], layout: str) -> Counter[int]:
    graph = autopar.trace(kind().to("meta"), (torch.empty(4, ROWS, WIDTH, device="meta"),))
    axes = autopar.Mesh("tp=2").whole
    plan = propagate_plan(graph, choose_layout(layout, axes), axes)
    tasks = profile(lower_step(graph, plan), load_cluster("h100")).backward
    sums = [task for task in tasks if task.name.endswith(" +=")]
    return Counter(round(task.bytes / (3 * torch.float32.itemsize)) for task in sums)


ROWS_SPLIT = "@/tanh[d1 -> tp]; op @first/linear[b -> tp]; op @/add[b -> tp]"
SHARED = "; ".join(f"op @{each}/linear[n -> tp]" for each in ("q", "k", "v"))
TWO_OF_THREE = "op @q/linear[n -> tp]; op @k/linear[b -> tp]; op @v/linear[n -> tp]"
WHOLE, HALF = 4 * ROWS * WIDTH, 4 * ROWS * WIDTH // 2


@pytest.mark.parametrize(
    ("kind", "layout", "sums"),
    [
        # Two sums of whole rows; the residual adds rows of a rank.
        (Products, f"{ROWS_SPLIT}; {SHARED}", {WHOLE: 2, HALF: 1}),
        # One before the reshard back, and one after it.
        (Products, f"{ROWS_SPLIT}; {TWO_OF_THREE}", {WHOLE: 1, HALF: 2}),
        # Nothing is resharded.
        (Products, "batch -> tp", {HALF: 3}),
        (Scores, "op @/einsum[i -> tp]; @/tanh[d2 -> tp]", {HALF: 1}),
    ],
)
def test_a_backward_adds_what_is_priced(kind: type[nn.Module], layout: str, sums: dict[int, int]) -> None:
    assert priced(kind, layout) == sums
    assert launch(added, kind, layout, ranks=2, seconds=150) == [sums] * 2
