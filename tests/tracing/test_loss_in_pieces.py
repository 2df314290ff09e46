"""The last linear layer and the loss of a traced model as one op: which models, and what one process gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar.ir.values import SequenceFold
from autopar.rules.ops.loss_pieces import LINEAR_CROSS_ENTROPY
from autopar.tracing.fold_sequence import fold_sequence
from autopar.tracing.loss_in_pieces import NoPieces, logits_bytes, loss_in_pieces

BATCH, SEQ, WIDTH, CLASSES = 3, 8, 6, 11


def merged(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options)


def capped(logits: Tensor, labels: Tensor) -> Tensor:
    return merged((logits / 3).tanh() * 3, labels)


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    return merged(logits[:, :-1], labels[:, 1:])


# By name, the loss of logits and labels, and the options of the op that takes its place.
LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], dict[str, Any]]] = {
    "mean": (merged, {"reduction": 2, "scale": 1.0, "softcap": 0.0, "dtype": None}),
    "sum": (lambda x, y: merged(x, y, reduction="sum", label_smoothing=0.1), {"reduction": 2, "label_smoothing": 0.1}),
    "each": (lambda x, y: merged(x, y, reduction="none", ignore_index=3).square().sum(), {"ignore_index": 3}),
    "cast": (lambda x, y: merged(x.float(), y), {"dtype": None}),
    "factor": (lambda x, y: merged(x * 0.25, y), {"scale": 0.25}),
    "cap": (capped, {"softcap": 3.0, "scale": 1.0}),
    "factor and cap": (lambda x, y: merged((x * 0.5).tanh() * 3, y), {"softcap": 3.0, "scale": 1.5}),
    "shift": (shifted, {"ignore_index": -100}),
}


class Model(nn.Module):
    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], bias: bool = True, returns: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias)
        self.loss, self.returns = loss, returns

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.head(self.norm(x))
        loss = self.loss(logits, labels)
        return (loss, logits) if self.returns else loss


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, CLASSES, (BATCH, SEQ), generator=generator)
    labels[0, :3] = -100
    return torch.randn(BATCH, SEQ, WIDTH, generator=generator).to(dtype), labels


def joined(graph: autopar.NamedGraph) -> Any:
    (node,) = graph.exported.graph_module.graph.find_nodes(op="call_function", target=LINEAR_CROSS_ENTROPY)
    return node


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str) -> None:
    loss, options = LOSSES[name]
    model, given = Model(loss), inputs()
    if name == "each":
        given[1].clamp_(min=0)
    graph = autopar.trace(model, given)
    found = loss_in_pieces(graph, 4, scalars_alone=False)
    assert {key: joined(found).kwargs.get(key) for key in options} == options
    assert joined(found).kwargs["pieces"] == found.loss_pieces == 4
    # No value has a number for each row and class.
    assert not any(one.shape[-1:] == (CLASSES,) and len(one.shape) > 1 for one in found.tensors.values())
    assert logits_bytes(graph) == BATCH * SEQ * CLASSES * 4
    assert logits_bytes(found) == 0
    expected, made = model(*given), found.module()(*given)
    torch.testing.assert_close(made, expected)
    parameters = tuple(model.parameters())
    for one, other in zip(*(torch.autograd.grad(each, parameters) for each in (made, expected)), strict=True):
        torch.testing.assert_close(one, other)


def test_half_precision_is_cast_as_the_model_does() -> None:
    for cast, dtype in ((Tensor.float, torch.float32), (Tensor.clone, None)):
        model = Model(lambda x, y, cast=cast: merged(cast(x), y)).bfloat16()
        given = inputs(torch.bfloat16)
        found = loss_in_pieces(autopar.trace(model, given), 2, scalars_alone=False)
        assert joined(found).kwargs["dtype"] is dtype
        assert joined(found).kwargs["reduction"] == (0 if dtype is None else 2)
        expected = model(*given)
        assert found.module()(*given).dtype is expected.dtype
        torch.testing.assert_close(found.module()(*given), expected, rtol=1e-2, atol=0)


def test_names_stay() -> None:
    model = Model(merged)
    graph = autopar.trace(model, inputs(), dims={"x": "batch seq d_model"})
    found = loss_in_pieces(graph, 4, scalars_alone=False)
    for name in ("x", "labels", "head.weight", "head.bias", "norm.weight"):
        assert found.tensors[name].dims == graph.tensors[name].dims
    (node,) = (node for node in found.nodes if node.op == str(LINEAR_CROSS_ENTROPY))
    assert (node.factors["r"], node.factors["v"]) == ("(batch seq)", graph.tensors["head.bias"].dims[0])


def test_returned_logits_are_dropped_with_the_other_results() -> None:
    graph = autopar.trace(Model(merged, returns=True), inputs())
    with pytest.raises(NoPieces, match="the model returns its logits"):
        loss_in_pieces(graph, 4, scalars_alone=False)
    loss, logits = loss_in_pieces(graph, 4, scalars_alone=True).module()(*inputs())
    assert logits is None
    assert loss.shape == ()


class Read(Model):
    """Logits are read by a second term."""

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.head(self.norm(x))
        return merged(logits, labels) + logits.logsumexp(-1).square().mean()


class Product(Model):
    """The last layer written as a product, with a weight that is stored either way."""

    def __init__(self, product: Callable[[Tensor, Tensor], Tensor], is_transposed: bool = False) -> None:
        super().__init__(merged, bias=False)
        self.product = product
        if is_transposed:
            self.head.weight = nn.Parameter(self.head.weight.detach().t().contiguous())

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return merged(self.product(self.norm(x), self.head.weight), labels)


PRODUCTS = {
    "t": Product(lambda x, weight: x @ weight.t()),
    "mT": Product(lambda x, weight: x @ weight.mT),
    "of rows": Product(lambda x, weight: (x.flatten(0, 1) @ weight.T).unflatten(0, (BATCH, SEQ))),
    "stored by columns": Product(torch.matmul, is_transposed=True),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str) -> None:
    model, given = PRODUCTS[name], inputs()
    found = loss_in_pieces(autopar.trace(model, given), 3, scalars_alone=False)
    expected, made = model(*given), found.module()(*given)
    torch.testing.assert_close(made, expected)
    parameters = tuple(model.parameters())
    for one, other in zip(*(torch.autograd.grad(each, parameters) for each in (made, expected)), strict=True):
        torch.testing.assert_close(one, other)


class Summed(Model):
    """Logits that no linear layer makes."""

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return merged(self.head(self.norm(x)) + self.head.weight.sum(1), labels)


class Weighted(Model):
    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return merged(self.head(self.norm(x)), labels, weight=torch.ones(CLASSES))


REFUSED = [
    (Read(merged), "'logsumexp' reads the logits too"),
    (Summed(merged), "the logits of the loss come from 'aten.add.Tensor', and not from a linear layer"),
    (Weighted(merged), "the loss has weights for its classes"),
    (Model(lambda x, y: functional.cross_entropy(x.mT, y)), "the loss does not take logits as rows of classes"),
    (Model(lambda x, y: merged(x.tanh(), y)), "changed by more than a factor, a soft cap and a cast"),
    (Model(lambda x, y: merged(x.bfloat16(), y)), "changed by more than a factor, a soft cap and a cast"),
    (Model(lambda x, y: x.sum() + y.sum()), "the model has no cross-entropy of class numbers"),
]


@pytest.mark.parametrize(("model", "message"), REFUSED, ids=[message[:30] for _, message in REFUSED])
def test_what_stays_whole(model: nn.Module, message: str) -> None:
    graph = autopar.trace(model, inputs())
    with pytest.raises(NoPieces, match=message):
        loss_in_pieces(graph, 4, scalars_alone=True)


def test_the_same_pieces_again() -> None:
    graph = autopar.trace(Model(merged), inputs())
    found = loss_in_pieces(graph, 4, scalars_alone=False)
    assert loss_in_pieces(found, 4, scalars_alone=False) is found
    assert loss_in_pieces(graph, 4, scalars_alone=False) is found
    with pytest.raises(NoPieces, match="changed by a plan already"):
        loss_in_pieces(found, 2, scalars_alone=False)


class Causal(Model):
    def forward(self, x: Tensor, labels: Tensor) -> Any:
        x = self.norm(x).unsqueeze(1)
        x = functional.scaled_dot_product_attention(x, x, x, is_causal=True).squeeze(1)
        return merged(self.head(x), labels)


def test_a_fold_follows() -> None:
    model, given = Causal(merged), inputs()
    graph = loss_in_pieces(autopar.trace(model, given, dims={"x": "batch seq d_model"}), 2, scalars_alone=False)
    found = fold_sequence(graph, SequenceFold("seq", 2), scalars_alone=False)
    assert (found.loss_pieces, found.fold) == (2, SequenceFold("seq", 2))
    assert not any(node.op.startswith("autopar.unfold") for node in found.nodes)
    torch.testing.assert_close(found.module()(*given), model(*given))
