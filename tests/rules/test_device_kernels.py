"""Kernels that a GPU takes for the ops of a graph: the same results, from the graph of a CPU."""

from __future__ import annotations

from operator import getitem

import pytest
import torch
from torch.fx import Graph, GraphModule

from autopar.rules.shard_call.device_kernels import (
    BATCH_NORM,
    batch_norm_on_gpu,
    of_any_dtypes,
    take_device_kernels,
)


def graph_of(*results: int, training: bool = True) -> Graph:
    graph = Graph()
    operands = [graph.placeholder(name) for name in ("x", "weight", "bias", "mean", "var")]
    normed = graph.call_function(BATCH_NORM, (*operands, training, 0.1, 1e-5))
    graph.output(tuple(graph.call_function(getitem, (normed, i)) for i in results))
    return graph


def targets(graph: Graph) -> set[object]:
    return {node.target for node in graph.nodes if node.op == "call_function"} - {getitem}


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_has_the_same_results(training: bool) -> None:
    torch.manual_seed(0)
    graph = graph_of(0, 3, 4, training=training)
    expected = GraphModule(torch.nn.Module(), graph)
    x = torch.randn(6, 5, 3, dtype=torch.float64, requires_grad=True)
    given = [x, *(torch.rand(5, dtype=torch.float64) for _ in range(4))]
    before = [one.detach().clone() for one in given]
    wanted = expected(*given)
    (gradient,) = torch.autograd.grad(wanted[0].square().sum(), x)
    take_device_kernels(graph, "cuda")
    assert targets(graph) == {of_any_dtypes(batch_norm_on_gpu)}
    found = GraphModule(torch.nn.Module(), graph)(*given)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-13)
    torch.testing.assert_close(torch.autograd.grad(found[0].square().sum(), x)[0], gradient, rtol=0, atol=1e-12)
    assert all(map(torch.equal, given, before)), "the running statistics are results, not changed in place"


def test_statistics_that_are_read_keep_their_op() -> None:
    graph = graph_of(0, 1, 3, 4)
    take_device_kernels(graph, "cuda")
    assert targets(graph) == {of_any_dtypes(BATCH_NORM)}


def test_a_cpu_keeps_its_ops() -> None:
    graph = graph_of(0, 3, 4)
    take_device_kernels(graph, "cpu")
    assert targets(graph) == {of_any_dtypes(BATCH_NORM)}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("image", "statistics"),
    [(torch.bfloat16, torch.float32), (torch.float64, torch.float32), (torch.float32, torch.bfloat16)],
)
def test_statistics_of_batch_norm_may_have_another_dtype(
    image: torch.dtype, statistics: torch.dtype, training: bool, device: str
) -> None:
    torch.manual_seed(0)
    graph = graph_of(0, 3, 4, training=training)
    take_device_kernels(graph, device)
    module = GraphModule(torch.nn.Module(), graph)
    x = torch.randn(6, 5, 3, dtype=image)
    weights = [torch.rand(5, dtype=image) for _ in range(2)]
    running = [torch.rand(5, dtype=statistics) for _ in range(2)]
    found = module(x, *weights, *running)
    expected = module(x.double(), *(one.double() for one in (*weights, *running)))
    assert [one.dtype for one in found] == [image, statistics, statistics]
    near = 0.02 if torch.bfloat16 in (image, statistics) else 1e-5
    torch.testing.assert_close([one.double() for one in found], list(expected), rtol=near, atol=near)
