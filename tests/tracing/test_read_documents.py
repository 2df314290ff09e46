"""Masks that keep documents apart, as models write them: which are read, and that results stay those of the model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar.ir.graph import NamedGraph
from autopar.ir.interpreter import TracedModule
from autopar.tracing.export.export import export
from tests.equivalence import compare, step
from tests.tracing.test_read_masks import OTHER, PACKED, PLAIN, assert_same_as_eager, hf

ROWS = 12
INF = float("inf")


class Model(nn.Module):
    """Attention under a mask that a function of the test makes from integers `[2, ROWS]`."""

    def __init__(self, mask: Callable[[Tensor], Tensor], dropout: float = 0.0) -> None:
        super().__init__()
        self.mask, self.dropout = mask, dropout
        self.linears = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor, numbers: Tensor) -> Tensor:
        mask = self.mask(numbers)
        for linear in self.linears:
            heads = linear(x).unflatten(-1, (2, 4)).transpose(1, 2)
            x = functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask, dropout_p=self.dropout)
            x = x.transpose(1, 2).flatten(2)
        return x


def place() -> Tensor:
    return torch.arange(ROWS)


def causal() -> Tensor:
    return place() <= place()[:, None]


def same(numbers: Tensor) -> Tensor:
    """True where a row and a key have one number: `[2, ROWS, ROWS]`."""
    return numbers[:, :, None] == numbers[:, None]


def packed(positions: Tensor) -> Tensor:
    """The mask of transformers for positions that begin again."""
    found = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    rows, keys = positions[:, None, :, None], positions[:, None, None]
    return (keys <= rows) & (found[:, None, :, None] == found[:, None, None])


def near(positions: Tensor) -> Tensor:
    """The mask of transformers for such positions and a window."""
    return packed(positions) & (positions[:, None, :, None] - 3 < positions[:, None, None])


def added(mask: Tensor, number: float) -> Tensor:
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, number)


READ: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "transformers": (packed, "documents"),
    "transformers, window": (near, "documents, window 3"),
    "numbers": (lambda x: (same(x) & causal())[:, None], "documents"),
    "numbers by another axis": (lambda x: (x[..., None] == x[:, None]).unsqueeze(1) & causal(), "documents"),
    "lower triangle": (lambda x: same(x).tril()[:, None], "documents"),
    "one mask of all samples": (lambda x: (x[0][:, None] == x[0]) & causal(), "documents"),
    "counted from separators": (lambda x: (same((x > 2).cumsum(1)) & causal())[:, None], "documents"),
    "two numbers": (lambda x: (same(x) & same(x % 3) & causal())[:, None], "documents"),
    "in both directions": (lambda x: same(x)[:, None], "documents, in both directions"),
    "window": (lambda x: (same(x) & causal() & (place() > place()[:, None] - 3))[:, None], "documents, window 3"),
    "padding": (lambda x: (same(x) & causal())[:, None] & (x > 0)[:, None, None], "documents"),
    "not other": (lambda x: (~((x[:, :, None] != x[:, None]) | ~causal()))[:, None], "documents"),
    "added": (lambda x: added((same(x) & causal())[:, None], -INF), "documents"),
    "added, finite": (lambda x: added((same(x) & causal())[:, None], -1e30), "documents"),
    "where": (lambda x: torch.where((same(x) & causal())[:, None], 0.0, -INF).double(), "documents"),
    "expanded": (lambda x: (same(x) & causal())[:, None].expand(2, 1, ROWS, ROWS), "documents"),
}

KEPT: dict[str, Callable[[Tensor], Tensor]] = {
    "other numbers": lambda x: (x[:, :, None] == (x + 1)[:, None])[:, None] | causal(),
    "not the same": lambda x: (x[:, :, None] != x[:, None])[:, None] | causal(),
    "either": lambda x: (same(x) | causal())[:, None],
    "padding alone": lambda x: causal() & (x > 0)[:, None, None],
    "order alone": lambda x: (x[:, None] <= x[:, :, None])[:, None],
    "reversed order": lambda x: (same(x) & (x[:, None] >= x[:, :, None]))[:, None],
    "rows that see nothing": lambda x: (same(x) & (x > 0)[:, :, None])[:, None],
    "later keys": lambda x: (same(x) & ~causal())[:, None],
    "shifted band": lambda x: (same(x) & (place() <= place()[:, None] + 1))[:, None],
    "by head": lambda x: (same(x) & causal())[:, None].expand(2, 2, ROWS, ROWS),
    "samples as heads": lambda x: same(x) & causal(),
    "a bias": lambda x: added((same(x) & causal())[:, None], -INF) + x[:, None, None],
    # A row that sees nothing has the mean of all values.
    "padding, finite": lambda x: added((same(x) & causal())[:, None] & (x > 0)[:, None, None], -1e30),
    "floats": lambda x: (same(x.double()) & causal())[:, None],
    "turned": lambda x: ((x[:, :, None] == x[:1, None]) & causal())[:, None],
}

# Documents, documents of one token, numbers that come again, positions that do not begin at 0, arbitrary ones.
NUMBERS = {
    "documents": torch.tensor([[0] * 5 + [1] * 7, [0] * 12]),
    "short": torch.tensor([[0, 1, 2, 2, 2, 3, 4, 4, 4, 4, 4, 5], [7, 7, 7, 7, 7, 7, 7, 1, 1, 1, 1, 0]]),
    "again": torch.tensor([[0, 0, 0, 1, 1, 1, 0, 0, 0, 2, 2, 2], [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]]),
    "positions": torch.tensor([[0, 1, 2, 3, 0, 1, 0, 0, 1, 2, 3, 4], [5, 6, 7, 90, 91, 92, 93, 3, 4, 5, 6, 7]]),
    "arbitrary": torch.tensor([[3, 1, 2, 2, 0, 1, 3, 0, 4, 4, 1, 4], [0, 0, 1, 0, 2, 1, 1, 0, 3, 3, 2, 2]]),
}


def traced(model: nn.Module) -> tuple[NamedGraph, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(2, ROWS, 8, dtype=torch.float64, requires_grad=True)
    return autopar.trace(model.double(), (x, NUMBERS["documents"])), x


def check(model: nn.Module, graph: NamedGraph, x: Tensor) -> None:
    for numbers in NUMBERS.values():
        compare(step(graph.module(), model, (x, numbers), {}), step(model, model, (x, numbers), {}), 1e-13)


@pytest.mark.parametrize("name", READ)
def test_documents(name: str) -> None:
    mask, note = READ[name]
    model = Model(mask)
    graph, x = traced(model)
    notes = [node.attention.mask for node in graph.nodes if node.attention is not None]
    assert notes == [note, note]
    # One table for both layers, and no mask.
    assert sum(node.op == "autopar.document_ranges.default" for node in graph.nodes) == 1
    assert not [one.name for one in graph.tensors.values() if one.shape[-2:] == (ROWS, ROWS)]
    check(model, graph, x)


@pytest.mark.parametrize("name", KEPT)
def test_other_masks(name: str) -> None:
    model = Model(KEPT[name])
    graph, x = traced(model)
    notes = [node.attention.mask for node in graph.nodes if node.attention is not None]
    assert all(note.startswith("mask kept: ") for note in notes), notes
    check(model, graph, x)


def test_dropout_keeps_the_mask() -> None:
    graph, _ = traced(Model(READ["numbers"][0], dropout=0.1).train())
    assert not any(node.op.startswith("autopar.document") for node in graph.nodes)


def test_the_share_of_the_scores() -> None:
    """That of the example inputs; without their data, that of one document."""
    graph, _ = traced(Model(READ["numbers"][0]))
    (share,) = {node.attention.document_share for node in graph.nodes if node.attention is not None}
    needed = sum(rows * (rows + 1) / 2 for rows in (5, 7, 12))
    assert share == needed / (2 * ROWS * ROWS)
    assert f"documents; {share:.3g} of all scores in the example inputs" in str(graph)
    with torch.device("meta"):
        model = Model(READ["numbers"][0])
        graph = autopar.trace(model, (torch.empty(2, ROWS, 8), torch.empty(2, ROWS, dtype=torch.int64)))
    assert "documents; priced as one" in str(graph)


# -- models of transformers --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text", "gpt2", "falcon", "phi3", "mixtral"])
def test_packed_documents(architecture: str) -> None:
    torch.manual_seed(0)
    model, inputs = hf(architecture)
    if architecture != "mixtral":  # its grouped matrix product knows no float64
        model.double()
    given = {**inputs, "position_ids": PACKED.clone()}
    notes = [node.attention.mask for node in autopar.trace(model, given).nodes if node.attention is not None]
    assert notes
    assert set(notes) <= {"documents", "documents, window 5"}
    traced = TracedModule(model, export(model, given))
    for positions in (PLAIN, PACKED, OTHER.clamp(max=9)):
        if architecture == "mixtral":
            found, expected = (one(**{**inputs, "position_ids": positions.clone()}).logits for one in (traced, model))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        else:
            assert_same_as_eager(model, traced, {**inputs, "position_ids": positions.clone()})
