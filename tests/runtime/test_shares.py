"""Unequal shares of the batch, `batch -> pod by 12:4`, on real ranks: one process gives the same to 1e-12."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import LayoutError
from autopar.lowering.verify_shapes import SHARD
from examples.gpt import gpt
from examples.moe import moe
from examples.resnet import resnet
from tests.runtime.launcher import launch
from tests.runtime.training import error_of, gap, gradients, worst

EVEN_STORAGE = "param, grad, opt { * -> pod | none }"


def words(**sizes: Any) -> Any:
    torch.manual_seed(0)
    return gpt(**{"layers": 1, "d_model": 24, "seq": 8, "vocab": 64, "batch": 16, **sizes})


def experts() -> Any:
    torch.manual_seed(0)
    return moe(batch=16)


def pictures() -> Any:
    torch.manual_seed(0)
    return resnet(depth=10, width=4, image=32, batch=8, loss=True, train=True)


def rows(parallel: Any, name: str = "tokens/embedding") -> int:
    """The rows of a value on this rank."""
    nodes = parallel.emitted.graph_module.graph.nodes
    found = {node.meta["local_shape"][0] for node in nodes if node.meta.get(SHARD, ("",))[0] == name}
    assert len(found) == 1
    return int(found.pop())


def train(make: Callable[[], Any], layout: str, mesh: str, **options: Any) -> tuple[float, float, int]:
    """The largest differences of losses and gradients, and of parameters, over five AdamW steps; the rows of a rank."""
    model, inputs = make()
    model = model.double()
    inputs = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    parallel = autopar.parallelize(model, mesh, inputs, layout=layout, **options)
    mine, theirs = (torch.optim.AdamW(one.parameters(), lr=3e-3) for one in (parallel, model))
    error = 0.0
    for step in range(5):
        torch.manual_seed(step)
        drawn = {
            name: torch.randn_like(x) if x.is_floating_point() else torch.randint(0, int(x.max()) + 1, x.shape)
            for name, x in inputs.items()
        }
        mine.zero_grad()
        theirs.zero_grad()
        expected, found = model(**drawn), parallel(**drawn)
        expected.backward()
        found.backward()
        error = max(error, gap(found, expected), worst(gradients(parallel), gradients(model)))
        mine.step()
        theirs.step()
    # A bias of keys has no gradient but rounding, which AdamW divides by itself.
    pairs = zip(parallel.named_parameters(), model.parameters(), strict=True)
    apart = max(gap(one, other) for (name, one), other in pairs if "qkv.bias" not in name)
    # In micro-batches the values stand in a graph of their own.
    return error, apart, rows(parallel) if "12:4" in layout else 0


@pytest.mark.parametrize(
    ("make", "layout", "mesh", "ranks"),
    [
        (words, f"batch -> pod by 12:4; * -> none; {EVEN_STORAGE}", "pod=2", 2),
        pytest.param(words, "batch -> pod by 12:4; * -> none", "pod=2", 2, marks=pytest.mark.slow),
        pytest.param(words, "micro 2; batch -> pod by 3:1; * -> none", "pod=2", 2, marks=pytest.mark.slow),
        pytest.param(words, "batch -> pod by 5:2:1; * -> none", "pod=3", 3, marks=pytest.mark.slow),
        pytest.param(
            words, f"batch -> pod*dp by 3:1; * -> none; {EVEN_STORAGE}", "pod=2,dp=2", 4, marks=pytest.mark.slow
        ),
        pytest.param(
            words, "batch -> pod by 3:1; (heads, d_ff, vocab) -> tp; * -> none", "pod=2,tp=2", 4, marks=pytest.mark.slow
        ),
        pytest.param(
            words, "micro 4; pipeline pp 1f1b; batch -> pod by 3:1; * -> none", "pod=2,pp=2", 4, marks=pytest.mark.slow
        ),
        pytest.param(pictures, "batch -> pod by 3:1; * -> none", "pod=2", 2, marks=pytest.mark.slow),
        pytest.param(experts, "batch -> pod by 3:1; * -> none", "pod=2", 2, marks=pytest.mark.slow),
        pytest.param(
            partial(words, layers=2),
            "batch -> pod by 3:1; * -> none; recompute full @blocks.*",
            "pod=2",
            2,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_shares_train_as_one_process(make: Callable[[], Any], layout: str, mesh: str, ranks: int) -> None:
    found = launch(train, make, layout, mesh, ranks=ranks)
    for error, parameters, _ in found:
        assert error < 1e-12
        assert parameters < 1e-12
    if "12:4" in layout:
        assert [count for *_, count in found] == [12, 4]


class Doubled(nn.Module):
    """A model that returns rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * 2


def hand_out(outputs: str) -> tuple[tuple[int, ...], float, float]:
    """The shape of a result, and the errors of its values and of the gradient of its mean."""
    torch.manual_seed(0)
    model, x = Doubled(), torch.randn(16, 8, dtype=torch.float64)
    layout = "batch -> pod by 12:4; * -> none"
    parallel = autopar.parallelize(model, "pod=2", (x,), layout=layout, dims={"x": "batch d_in"}, outputs=outputs)  # type: ignore[arg-type]
    expected, found = model(x), parallel(x)
    expected.mean().backward()
    found.mean().backward()
    start = 12 * torch.distributed.get_rank() if outputs == "local" else 0
    part = expected[start : start + found.shape[0]]
    return tuple(found.shape), gap(found, part), worst(gradients(parallel), gradients(model))


def refuse() -> list[str]:
    model, x = Doubled(), torch.randn(16, 8, dtype=torch.float64)

    def make(layout: str, **options: Any) -> str:
        def call() -> Any:
            return autopar.parallelize(model, "pod=2", (x,), layout=layout, dims={"x": "batch d_in"}, **options)

        return error_of(call, LayoutError)

    return [
        make("batch -> pod by 12:4; * -> none", outputs="sharded"),
        make("batch -> pod by speed; * -> none"),
    ]


def test_results() -> None:
    whole = launch(hand_out, "full", ranks=2)
    assert [shape for shape, _, _ in whole] == [(16, 8), (16, 8)]
    local = launch(hand_out, "local", ranks=2)
    assert [shape for shape, _, _ in local] == [(12, 8), (4, 8)]
    assert max(error for _, *errors in (*whole, *local) for error in errors) < 1e-12
    (sharded, speed), _ = launch(refuse, ranks=2)
    assert "has shards of unequal shares, and outputs='sharded' returns DTensors" in sharded
    assert speed.startswith("E5: the speeds along pod are unknown")
