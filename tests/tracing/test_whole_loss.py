"""A loss of a slice of the rows is that of all rows, with targets that are ignored."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from tests.equivalence import assert_equivalent

Loss = Callable[[Tensor, Tensor], Tensor]
ROWS, CLASSES = 6, 5


class Model(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.head, self.loss = nn.Linear(4, CLASSES), loss

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.head(x), labels)


def merged(logits: Tensor, labels: Tensor, **options: object) -> Tensor:
    return functional.cross_entropy(logits.reshape(-1, CLASSES), labels.reshape(-1), **options)  # type: ignore[arg-type]


REWRITTEN: dict[str, Loss] = {
    "next token": lambda x, y: merged(x[:, :-1].contiguous(), y[:, 1:].contiguous()),
    "all dims": lambda x, y: merged(x[..., :-1, :], y[..., 1:]),
    "two tokens on": lambda x, y: merged(x[:, :-2], y[:, 2:]),
    "after a prefix": lambda x, y: merged(x[:, 2:], y[:, 2:]),
    "a sum": lambda x, y: merged(x[:, :-1], y[:, 1:], reduction="sum"),
    "smoothed": lambda x, y: merged(x[:, :-1], y[:, 1:], label_smoothing=0.1),
    "weights of classes": lambda x, y: merged(x[:, :-1], y[:, 1:], weight=torch.arange(1.0, 6, dtype=x.dtype)),
    "another number": lambda x, y: merged(x[:, :-1], y[:, 1:], ignore_index=3),
    "in float32": lambda x, y: merged(x[:, :-1].float(), y[:, 1:]),
    "without a batch": lambda x, y: functional.cross_entropy(x[0, :-1], y[0, 1:]),
}
KEPT: dict[str, Loss] = {
    "a loss for each row": lambda x, y: merged(x[:, :-1], y[:, 1:], reduction="none"),
    "the last tokens": lambda x, y: merged(x[:, -2:], y[:, -2:]),
    "every second row": lambda x, y: merged(x[:, ::2], y[:, ::2]),
    "some of the batch": lambda x, y: merged(x[:1], y[:1]),
    "merged before": lambda x, y: functional.cross_entropy(x.flatten(0, 1)[:-4], y.flatten()[4:].sort().values[:8]),
}


def inputs() -> tuple[Tensor, Tensor]:
    labels = torch.tensor([[0, 1, -100, 3, 4, 1], [2, 2, 0, 4, 3, 0]])
    return torch.randn(2, ROWS, 4), labels


def has_slice(loss: Loss) -> bool:
    """Return whether values with a gradient are sliced."""
    graph = autopar.trace(Model(loss), inputs())
    named = [node for node in graph.nodes if ".slice." in node.op]
    return any(graph.tensors[node.outputs[0] or ""].requires_grad for node in named)


@pytest.mark.parametrize("name", REWRITTEN)
def test_rewritten(name: str) -> None:
    assert not has_slice(REWRITTEN[name])
    x, labels = inputs()
    if name == "another number":
        labels = labels.clamp(min=0)
    assert_equivalent(Model(REWRITTEN[name]), (x, labels))


@pytest.mark.parametrize("name", KEPT)
def test_kept(name: str) -> None:
    assert name == "merged before" or has_slice(KEPT[name])
    x, labels = inputs()
    assert_equivalent(Model(KEPT[name]), (x, labels.clamp(min=0) if name == "merged before" else labels))
