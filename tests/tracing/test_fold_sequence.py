"""The fold as a pass: the same results, and which ops run in which order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar.errors import LayoutError
from autopar.ir.graph import NamedGraph
from autopar.plans.folded import fold_that_pays, in_order
from autopar.sharding.layout.language import parse_layout
from autopar.tracing.fold_sequence import unfolded_activations
from tests.equivalence import compare, step

ROWS = 24


class Model(nn.Module):
    """Causal attention between two functions of the test."""

    def __init__(
        self, before: Callable[[Tensor], Tensor] | None = None, after: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        self.before, self.after = before or nn.Identity(), after or nn.Identity()
        self.linear = nn.Linear(8, 8)
        self.table = nn.Parameter(torch.randn(2 * ROWS, 8))  # twice as long as the sequence

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(self.before(x) + self.table[: x.shape[1]])
        heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
        x = functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return self.after(x.transpose(1, 2).flatten(2))


def folded(model: nn.Module, pieces: int = 2, rows: int = ROWS) -> NamedGraph:
    torch.manual_seed(0)
    graph = autopar.trace(model.double(), (torch.randn(2, rows, 8, dtype=torch.float64),))
    return in_order(graph, parse_layout(f"fold seq {pieces}"), "sharded")


def check(model: nn.Module, graph: NamedGraph) -> None:
    """The folded graph gives what the model gives; in another order sums round otherwise."""
    args = (torch.randn(2, ROWS, 8, dtype=torch.float64, requires_grad=True),)
    expected = step(model, model, args, {})
    compare(step(graph.module(), model, args, {}), expected, 1e-14)


def ops(graph: NamedGraph, name: str) -> list[str]:
    return [node.name for node in graph.nodes if node.op == f"autopar.{name}.default"]


# By what the model does before or after attention: the values with a gradient that are brought back for it.
ORDER_FREE: dict[str, Callable[[Tensor], Tensor]] = {
    "pointwise": torch.tanh,
    "norm": lambda x: functional.layer_norm(x, (8,)),
    "sum over the sequence": lambda x: x.sum(1),
    "mean over the sequence": lambda x: x.mean((1, 2)),
    "softmax over the sequence": lambda x: x.softmax(1),
    "merged with the batch": lambda x: x.flatten(0, 1).tanh(),
    "positions": lambda x: x * torch.arange(x.shape[1], dtype=x.dtype)[:, None],
}
IN_ORDER: dict[str, Callable[[Tensor], Tensor]] = {
    "cumsum": lambda x: x.cumsum(1),
    "shift": lambda x: functional.pad(x[:, :-1], (0, 0, 1, 0)),
    "roll": lambda x: x.roll(1, 1),
    "flip": lambda x: x.flip(1),
    "last token": lambda x: x[:, -1],
    "sort": lambda x: x.sort(1).values,
    "a triangle": lambda x: (x @ x.mT).tril() @ x,
    "convolution": lambda x: functional.conv1d(
        x.mT, torch.ones(8, 1, 3, dtype=x.dtype), padding=1, groups=8
    ).mT.contiguous(),
}


@pytest.mark.parametrize("pieces", [2, 4])
@pytest.mark.parametrize("name", ORDER_FREE)
def test_ops_that_do_not_depend_on_the_order(name: str, pieces: int) -> None:
    for model in (Model(after=ORDER_FREE[name]), Model(before=torch.tanh)):
        graph = folded(model, pieces)
        assert not unfolded_activations(graph)
        check(model, graph)


@pytest.mark.parametrize("name", IN_ORDER)
def test_ops_that_depend_on_the_order(name: str) -> None:
    model = Model(after=IN_ORDER[name])
    graph = folded(model)
    assert unfolded_activations(graph)
    check(model, graph)
    assert fold_that_pays(autopar.trace(model, (torch.randn(2, ROWS, 8, dtype=torch.float64),)), "sharded") is None


def test_a_value_changes_its_order_once() -> None:
    graph = folded(Model(after=lambda x: x.cumsum(1) + x.flip(1)))
    assert len(ops(graph, "unfold")) == 1
    # The sum of both stays in the plain order of the result.
    assert len(ops(graph, "folded_attention")) == 1


def padded(labels: Tensor) -> Tensor:
    return functional.pad(labels.long().contiguous(), (0, 1), value=-100)[:, 1:]


class Labels(nn.Module):
    def __init__(self, is_cut: bool) -> None:
        super().__init__()
        self.model, self.head, self.is_cut = Model(), nn.Linear(8, 5), is_cut

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.model(x))
        if self.is_cut:
            return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return functional.cross_entropy(logits.flatten(0, 1), padded(labels).flatten())


@pytest.mark.parametrize("is_cut", [False, True])
def test_labels_are_shifted_and_then_folded(is_cut: bool) -> None:
    model = Labels(is_cut).double()
    inputs = torch.randn(2, ROWS, 8, dtype=torch.float64), torch.randint(0, 5, (2, ROWS))
    graph = in_order(autopar.trace(model, inputs), parse_layout("fold seq"), "sharded")
    assert not ops(graph, "unfold")
    # The input, the table of positions, the labels.
    assert len(ops(graph, "fold")) == 3
    (pad,) = (node for node in graph.nodes if "pad" in node.op)
    assert not graph.tensors[pad.outputs[0] or ""].requires_grad
    compare(step(graph.module(), model, inputs, {}), step(model, model, inputs, {}), 1e-14)


def test_names_are_those_of_the_plain_graph() -> None:
    model = Model().double()
    plain = autopar.trace(model, (torch.randn(2, ROWS, 8, dtype=torch.float64),))
    graph = folded(model)
    assert {name for name in graph.dims if name != "fold"} == set(plain.dims)
    for name, tensor in plain.tensors.items():
        if name in graph.tensors:
            shown = {dim.replace("(fold seq)", "seq").replace("(seq fold)", "seq") for dim in graph.tensors[name].dims}
            assert shown == set(tensor.dims), name
    assert graph.dims["fold"].sizes == (2,)


MISTAKES = [
    ("fold seq 10", Model(), "seq = 24 cannot be folded in 10 pieces of equal length from 2 up"),
    ("fold seq 24", Model(), "seq = 24 cannot be folded in 24 pieces of equal length from 2 up"),
    ("fold sequence", Model(), "there is no dim 'sequence'"),
    ("fold d_model", Model(), "no causal attention has rows of 'd_model'"),
    ("fold seq", Model(after=lambda x: functional.dropout(x, 0.5)), "draws random numbers along 'seq'"),
]


@pytest.mark.parametrize(("text", "model", "message"), MISTAKES)
def test_a_sequence_that_cannot_be_folded(text: str, model: nn.Module, message: str) -> None:
    graph = autopar.trace(model.double(), (torch.randn(2, ROWS, 8, dtype=torch.float64),))
    with pytest.raises(LayoutError) as error:
        in_order(graph, parse_layout(text, "my.lay"), "sharded")
    assert message in str(error.value)
    assert "my.lay:1" in str(error.value)
    assert "\nfix: " in str(error.value)


def test_windows_need_no_mask() -> None:
    class Window(Model):
        def forward(self, x: Tensor) -> Tensor:
            heads = self.linear(x).unflatten(-1, (2, 4)).transpose(1, 2)
            place = torch.arange(x.shape[1])
            seen = (place <= place[:, None]) & (place > place[:, None] - 5)
            return functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=seen).flatten(2)

    model = Window()
    graph = folded(model, 4)
    assert not any(tensor.dtype is torch.bool for tensor in graph.tensors.values())
    check(model, graph)
