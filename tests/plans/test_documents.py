"""Plans of packed documents: their price, the pieces of their fold, what cannot be pinned."""

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
from autopar.plans.plan import Plan
from autopar.sharding.layout.language import parse_layout

ROWS = 16384


class Block(nn.Module):
    """Attention of documents with one head, which cannot be split by heads."""

    def __init__(self, width: int = 64, causal: bool = True) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.causal = causal

    def forward(self, x: Tensor, document: Tensor) -> Tensor:
        q, k, v = (linear(x).unsqueeze(1) for linear in (self.q, self.k, self.v))
        mask = (document[:, None] == document[..., None])[:, None]
        mask = mask.tril() if self.causal else mask
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).squeeze(1)


def inputs(documents: int = 8, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Return inputs with documents of one length; without data where there are none."""
    if not documents:
        return torch.empty(1, rows, 64, device="meta"), torch.empty(1, rows, dtype=torch.int64, device="meta")
    return torch.empty(1, rows, 64), torch.arange(rows)[None] * documents // rows


def graph_of(documents: int = 8, rows: int = ROWS, causal: bool = True) -> NamedGraph:
    with torch.device("cpu" if documents else "meta"):
        return autopar.trace(Block(causal=causal), inputs(documents, rows))


def share_of(graph: NamedGraph, rows: int | None = None) -> float:
    (node,) = (node for node in graph.nodes if node.attention is not None)
    return unmasked_share(node, node.sizes if rows is None else {**node.sizes, "s": rows})


def test_the_price_is_that_of_the_example_inputs() -> None:
    assert share_of(graph_of(8)) == pytest.approx(1 / 16, rel=1e-2)
    assert share_of(graph_of(8, causal=False)) == pytest.approx(1 / 8, rel=1e-2)
    # Without data, that of one document.
    assert share_of(graph_of(0)) == share_of(graph_of(1)) == pytest.approx(1 / 2, rel=1e-3)
    assert share_of(graph_of(0, causal=False)) == 1
    folded = in_order(graph_of(8), parse_layout("fold seq 16"), "sharded")
    assert share_of(folded) == pytest.approx(1 / 16, rel=1e-2)
    # In the plain order the last shard has most.
    assert share_of(graph_of(8), ROWS // 8) == pytest.approx(1 / 16 * (2 - 1 / 8), rel=1e-2)


def plan_of(documents: int, **options: object) -> Plan:
    model = Block().to(inputs(documents)[0].device)
    return autopar.plan(model, "cp=4", inputs(documents), cluster="h100", cache=False, time_limit=4, **options)  # type: ignore[arg-type]


def test_a_search_folds_documents_in_more_pieces() -> None:
    assert fold_that_pays(graph_of(2, 64), "sharded") is None
    for documents in (0, 2):
        folded = fold_that_pays(graph_of(documents), "sharded")
        assert folded is not None
        assert folded.fold is not None
        assert folded.fold.pieces == 16
    short = fold_that_pays(graph_of(1, 8192), "sharded")
    assert short is not None
    assert short.fold is not None
    assert short.fold.pieces == 2


def test_plans_with_documents() -> None:
    layout = "fold seq 16; seq -> cp; * -> none"
    plans = [plan_of(documents, layout=layout) for documents in (0, 1, 8)]
    seconds = [plan.step_seconds for plan in plans]
    assert seconds[0] == seconds[1] > 1.2 * seconds[2]
    said = "attention of documents is priced "
    assert f"{said}as one document in each sample: the example inputs have no data" in str(plans[0])
    assert f"{said}at 0.063 of all scores, as in the example inputs" in str(plans[2])
    # A plan does not depend on the data, its price does.
    read = Plan.read(plans[2].text, graph_of(0))
    assert read.graph.fold == plans[2].graph.fold
    assert read.step_seconds > 1.2 * seconds[2]
    kinds = {one.kind for one in plans[2].collectives if "document_attention" in str(one)}
    assert kinds == {"all_gather", "reduce_scatter"}


def test_memory_counts_copies_and_gradients() -> None:
    """Under a fold keys and values are copied, and gradients are added up in float32."""
    folded = in_order(graph_of(8), parse_layout("fold seq 16"), "sharded")
    (node,) = (node for node in folded.nodes if node.attention is not None)
    footprint = folded.footprints[node.node]
    each = ROWS * 64 * 4
    # Rows, keys and values in the plain order, and the result.
    assert 4 * each <= footprint.forward_bytes <= 8 * each
    assert 7 * each <= footprint.backward_bytes <= 14 * each


def test_keys_of_documents_do_not_pass_in_a_ring() -> None:
    with pytest.raises(LayoutError, match="documents are looked up in the keys of all ranks: leave out 't'"):
        plan_of(8, layout="seq -> cp; op @*document_attention[s -> cp, t -> cp]; * -> none")
