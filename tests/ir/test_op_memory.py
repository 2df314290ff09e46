"""What ops keep and pass on, as seen by running them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import autopar
from autopar.ir.analysis.op_memory import Footprint, LiveBytes


class Call(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.function(*tensors)


def footprint(function: Any, *shapes: tuple[int, ...]) -> Footprint:
    """Of the first op."""
    tensors = tuple(torch.randn(shape, requires_grad=True) for shape in shapes)
    graph = autopar.trace(Call(function), tensors)
    return graph.footprints[graph.nodes[0].node]


def test_a_product_keeps_its_operands() -> None:
    found = footprint(torch.matmul, (3, 4), (4, 5))
    assert (found.keeps, found.keeps_outputs, found.aliases, found.passes) == ((0, 1), (), (None,), frozenset())


def test_a_sum_keeps_nothing_and_passes_its_gradient_on() -> None:
    found = footprint(torch.add, (3, 4), (3, 4))
    assert (found.keeps, found.passes) == ((), frozenset({0, 1}))
    assert footprint(torch.add, (3, 4), (4,)).passes == frozenset({0}), "that of a broadcast operand is summed"


def test_what_is_kept_of_a_function_is_its_result_or_its_operand() -> None:
    assert (footprint(torch.relu, (3, 4)).keeps, footprint(torch.relu, (3, 4)).keeps_outputs) == ((), (0,))
    assert footprint(functional.gelu, (3, 4)).keeps == (0,)


def test_views_share_memory() -> None:
    assert footprint(lambda x: x.transpose(0, 1), (3, 4)).aliases == (0,)
    assert footprint(lambda x: x.reshape(12), (3, 4)).aliases == (0,)
    assert footprint(lambda x: x.reshape(3, 2, 2).permute(2, 0, 1), (3, 4)).passes == frozenset({0})
    found = footprint(lambda x: torch.stack(x.unbind(0)).sum(), (3, 4))
    assert found.aliases == (0, 0, 0)
    assert not found.passes, "the gradients of the parts are put together"


def test_what_is_inside() -> None:
    found = footprint(lambda x: functional.layer_norm(x, (8,)), (6, 8))
    assert found.keeps == (0,)
    assert found.internal_bytes == 2 * 6 * 4, "a mean and a deviation for each row"
    tokens = torch.randint(8, (6,))
    found = footprint(lambda x: functional.cross_entropy(x, tokens), (6, 8))
    assert found.internal_bytes >= 6 * 8 * 4, "the logarithms of the probabilities"
    assert found.backward_bytes > 0


def test_without_gradients_nothing_is_kept() -> None:
    graph = autopar.trace(Call(torch.matmul), (torch.randn(3, 4), torch.randn(4, 5)))
    assert not graph.footprints[graph.nodes[0].node].keeps


def test_equal_calls_are_run_once() -> None:
    graph = autopar.trace(Call(lambda x: torch.relu(x.relu()).tanh()), (torch.randn(3, requires_grad=True),))
    first, second, third = (graph.footprints[node.node] for node in graph.nodes)
    assert first is second
    assert third is not first


@pytest.mark.parametrize("grows", [True, False])
def test_live_bytes(grows: bool) -> None:
    with LiveBytes() as counter:
        kept = [torch.zeros(256)]
        assert (counter.live, counter.peak) == (1024, 1024)
        view = kept[0][:4]
        assert counter.live == 1024, "a view has no memory of its own"
        if not grows:
            kept.clear()
        assert counter.live == 1024
        del view
        kept.append(kept[0] + 1 if grows else torch.zeros(1))
        assert counter.live == (2048 if grows else 4)
        assert counter.peak == (2048 if grows else 1024)


def test_what_only_a_gpu_can_do_is_looked_at_without_one(caplog: pytest.LogCaptureFixture) -> None:
    """A histogram of whole numbers: models count tokens per expert so, but not on a CPU."""

    def counted(x: torch.Tensor) -> torch.Tensor:
        chosen = x.argmax(-1).int()
        return x.softmax(-1).sum() + torch.histc(chosen, 4, 0, 3).sum()

    graph = autopar.trace(Call(counted), (torch.randn(6, 4, device="meta", requires_grad=True),))
    (node,) = (node for node in graph.nodes if "histc" in node.op)
    found = graph.footprints[node.node]
    assert (found.keeps, found.keeps_outputs, found.aliases) == ((), (), (None,))
    assert [tensor.node.split("_")[0] for tensor in graph.saved] == ["softmax"]
    assert "failed while attempting" not in caplog.text


class CalledTwice(nn.Module):
    """The second call takes the statistics that the first one made."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU())

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.layers(x) * self.layers(y)).sum()


def test_statistics_of_batches_have_no_gradient() -> None:
    graph = autopar.trace(CalledTwice(), (torch.randn(5, 6), torch.randn(5, 6)))
    made = [t for t in graph.tensors.values() if "batch_norm" in t.name]
    assert [t.requires_grad for t in made if t.shape == (5, 8)] == [True, True]
    assert [t.requires_grad for t in made if t.shape == (8,) and t.name.endswith((":3", ":4"))] == [False] * 4
    assert {node.node for node in graph.nodes} <= set(graph.footprints)
