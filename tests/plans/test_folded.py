"""Where a search folds the sequence, and what it saves by the price."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar.cost.compute.unmasked_scores import unmasked_share
from autopar.errors import LayoutError
from autopar.ir.graph import NamedGraph
from autopar.plans.folded import fold_that_pays, in_order
from autopar.sharding.layout.language import parse_layout


class Block(nn.Module):
    """Attention with one head, which cannot be split by heads."""

    def __init__(self, width: int, window: int = 0) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.window = window

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (linear(x).unsqueeze(1) for linear in (self.q, self.k, self.v))
        if not self.window:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        place = torch.arange(x.shape[1])
        seen = (place <= place[:, None]) & (place > place[:, None] - self.window)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=seen).squeeze(1)


def graph_of(rows: int, window: int = 0) -> NamedGraph:
    with torch.device("meta"):
        return autopar.trace(Block(64, window), (torch.empty(1, rows, 64),))


def test_the_price_of_attention_is_that_of_the_busiest_shard() -> None:
    plain = graph_of(4096)
    folded = in_order(plain, parse_layout("fold seq"), "sharded")
    shares = []
    for graph, rows in ((plain, 4096 // 8), (folded, 2048 // 8)):
        (node,) = (node for node in graph.nodes if node.attention is not None)
        shares.append(unmasked_share(node, {**node.sizes, "s": rows}))
    assert shares[1] == pytest.approx(0.5, rel=1e-3)
    assert shares[0] / shares[1] == pytest.approx(2 - 1 / 8, rel=1e-3)


def test_a_window_is_priced_by_its_keys() -> None:
    folded = in_order(graph_of(4096, window=64), parse_layout("fold seq"), "sharded")
    (node,) = (node for node in folded.nodes if node.attention is not None)
    pairs = sum(min(row + 1, 64) for row in range(4096))
    assert unmasked_share(node, node.sizes) == pytest.approx(pairs / 4096**2)


def test_short_sequences_keep_their_order() -> None:
    assert fold_that_pays(graph_of(32), "sharded") is None
    assert fold_that_pays(graph_of(8192), "sharded") is not None
    # Three pieces of a sequence cannot be paired.
    assert fold_that_pays(graph_of(8191), "sharded") is None


def test_ranks_divide_the_positions_of_a_piece() -> None:
    with torch.device("meta"):
        model, inputs = Block(64), (torch.empty(1, 30, 64),)
    with pytest.raises(LayoutError, match="cp = 2 does not divide 15, the positions in each of 2 pieces of the fold"):
        autopar.plan(model, "cp=2", inputs, layout="fold seq; seq -> cp", cluster="h100", cache=False)


def test_a_search_folds() -> None:
    with torch.device("meta"):
        model, inputs = Block(64), (torch.empty(1, 65536, 64),)
    found = {}
    for layout in (None, "fold seq none"):
        plan = autopar.plan(model, "cp=4", inputs, layout=layout, cluster="h100", cache=False, time_limit=4)
        found[layout] = plan
        assert ("\nfold seq\n" in plan.text) == (layout is None)
    assert found[None].step_seconds < 0.7 * found["fold seq none"].step_seconds
    again = autopar.Plan.read(found[None].text, autopar.trace(model, inputs))
    assert again.text == found[None].text
