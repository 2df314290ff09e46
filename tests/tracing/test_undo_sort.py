"""Rows that are sorted by expert and put back: the traced graph leaves the sort out where it can, and only there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.sharding.contracts import check_contracts
from autopar.sharding.layout.language import choose_layout
from autopar.sharding.propagation import propagate
from autopar.sharding.reshard_insertion import inserted_reshards
from autopar.tracing.passes.undo_sort import MOST_ROWS
from examples.hf import hf
from tests.equivalence import assert_equivalent

pytest.importorskip("transformers.integrations.moe")
grouped = torch.ops.transformers.grouped_mm_fallback  # torch's own has no float64

ROWS, EXPERTS, EACH = 8, 4, 2
SORTS = {"aten.sort.default", "aten.sort.stable", "aten.argsort.default", "aten.argsort.stable"}


class Experts(nn.Module):
    """A router, and a function of rows, shares and the experts that were chosen."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function
        self.router = nn.Linear(16, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, 16, 24) * 0.3)
        self.down = nn.Parameter(torch.randn(EXPERTS, 24, 16) * 0.3)
        self.bias = nn.Parameter(torch.randn(EXPERTS, 24))

    def forward(self, x: Tensor) -> Tensor:
        share, chosen = self.router(x).softmax(-1).topk(EACH, -1)
        return self.function(self, x, share, chosen)


def ends_of(chosen: Tensor) -> Tensor:
    return nn.functional.one_hot(chosen, EXPERTS).sum(0).cumsum(0).to(torch.int32)


def products(m: Experts, rows: Tensor, experts: Tensor, ends: Tensor) -> Tensor:
    hidden = grouped(rows, m.up, ends) + m.bias[experts]
    return grouped(hidden.relu(), m.down, ends)


def put_back(m: Experts, x: Tensor, share: Tensor, chosen: Tensor) -> Tensor:
    flat = chosen.flatten()
    experts, order = flat.sort()
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=x.device)
    out = products(m, x[order // EACH], experts, ends_of(flat)) * share.flatten()[order, None]
    return out[back].view(ROWS, EACH, -1).sum(1)


def added_up(m: Experts, x: Tensor, share: Tensor, chosen: Tensor) -> Tensor:
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    of_row = torch.arange(ROWS, device=x.device).repeat_interleave(EACH)[order]
    out = products(m, x[of_row], flat[order], ends_of(flat)) * share.flatten()[order].unsqueeze(-1)
    return x.index_add(0, of_row, out)


def left_sorted(m: Experts, x: Tensor, share: Tensor, chosen: Tensor) -> Tensor:
    flat = chosen.flatten()
    experts, order = flat.sort()
    return products(m, x[order // EACH], experts, ends_of(flat))


def mixed(m: Experts, x: Tensor, share: Tensor, chosen: Tensor) -> Tensor:
    """What a row gets depends on the rows before it in the order."""
    flat = chosen.flatten()
    experts, order = flat.sort()
    out = products(m, x[order // EACH], experts, ends_of(flat)).cumsum(0)
    return out[order.argsort()]


def other_ends(m: Experts, x: Tensor, share: Tensor, chosen: Tensor) -> Tensor:
    """The groups do not end where the rows of the experts do."""
    flat = chosen.flatten()
    experts, order = flat.sort()
    ends = torch.arange(1, EXPERTS + 1, dtype=torch.int32, device=x.device) * (ROWS * EACH // EXPERTS) + 0 * ends_of(
        flat
    )
    return products(m, x[order // EACH], experts, ends)[order.argsort()]


def elsewhere(m: Experts, x: Tensor, share: Tensor, chosen: Tensor) -> Tensor:
    """Put into another order than the first."""
    flat = chosen.flatten()
    experts, order = flat.sort()
    return products(m, x[order // EACH], experts, ends_of(flat))[order]


def counted_whole(m: Experts, x: Tensor, share: Tensor, chosen: Tensor) -> Tensor:
    """As transformers count on a GPU: `histc` of integers, which the CPU does not have."""
    flat = chosen.flatten()
    experts, order = flat.sort()
    ends = torch.histc(experts.int(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)
    return products(m, x[order // EACH], experts, ends)[order.argsort()]


def ops(graph: autopar.NamedGraph) -> set[str]:
    return {node.op for node in graph.nodes}


CASES = (
    *((put_back, False), (added_up, False)),
    *((left_sorted, True), (mixed, True), (other_ends, True), (elsewhere, True)),
)


@pytest.mark.parametrize(("function", "sorted_still"), CASES)
def test_the_sort_is_left_out_where_it_is_undone(function: Any, sorted_still: bool) -> None:
    torch.manual_seed(0)
    model = Experts(function)
    inputs = (torch.randn(ROWS, 16),)
    graph = autopar.trace(model, inputs)
    assert bool(ops(graph) & SORTS) == sorted_still
    assert ("autopar.grouped.default" in ops(graph)) != sorted_still
    assert_equivalent(model, inputs)


@pytest.mark.parametrize(("function", "sorted_still"), CASES)
def test_more_rows_than_a_check_sorts(function: Any, sorted_still: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the rows tells the same: 31 million here, 500 million in a step of DeepSeek-V3."""
    monkeypatch.setitem(globals(), "ROWS", 15 * MOST_ROWS // 8)
    with torch.device("meta"):
        model, inputs = Experts(function), (torch.randn(ROWS, 16),)
    found = ops(autopar.trace(model, inputs))
    assert bool(found & SORTS) == sorted_still
    assert ("autopar.grouped.default" in found) != sorted_still


def test_the_sort_is_left_out_where_the_cpu_lacks_a_kernel_of_the_device() -> None:
    with torch.device("meta"):
        model, inputs = Experts(counted_whole), (torch.randn(ROWS, 16),)
        inside = ops(autopar.trace(model, inputs))
    found = ops(autopar.trace(model, inputs))
    assert found == inside
    assert "autopar.grouped.default" in found
    assert not found & SORTS


def test_under_data_parallelism_tokens_stay_with_their_rank() -> None:
    """Warnings are errors: `fsdp` says what it gathers of activations."""
    graph = autopar.trace(*hf("mixtral", batch=4))
    layout = choose_layout("fsdp", {"fsdp": 2})
    assignment = propagate(graph, layout, {"fsdp": 2})
    inserted = inserted_reshards(graph, assignment, "sharded")
    check_contracts(layout, graph, assignment, inserted)
    sent = {graph.tensors[one.tensor].kind for one in inserted for way, _ in one.collectives() if way == "forward"}
    assert sent == {"param"}
