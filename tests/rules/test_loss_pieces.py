"""A linear layer and its cross-entropy in pieces: what the two ops give one after the other, in less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from autopar.ir.analysis.op_memory import LiveBytes
from autopar.rules.ops.loss_pieces import LINEAR_CROSS_ENTROPY
from autopar.rules.shard_call.loss_pieces import LogitsForm, _RowStatistics, piece_sizes

ROWS, WIDTH, CLASSES = 23, 6, 11


def operands(dtype: torch.dtype, bias: bool = True, rows: int = ROWS) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(5)
    shapes = (rows, WIDTH), (CLASSES, WIDTH), (CLASSES,)
    made = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    target = torch.randint(0, CLASSES, (rows,), generator=generator)
    target[::4] = -100
    return [made[0], made[1], made[2] if bias else None, target]


def eager(given: list[Any], reduction: str, smoothing: float, scale: float, softcap: float, cast: Any) -> Tensor:
    rows, weight, bias, target = given
    logits = functional.linear(rows, weight, bias)
    logits = logits if scale == 1 else logits * scale
    logits = torch.tanh(logits / softcap) * softcap if softcap else logits
    logits = logits if cast is None else logits.to(cast)
    return functional.cross_entropy(logits, target, reduction=reduction, label_smoothing=smoothing)


def gradients(loss: Tensor, given: list[Any]) -> list[Tensor]:
    trained = [one for one in given[:3] if one is not None]
    weights = torch.linspace(0.5, 2, loss.numel(), dtype=loss.dtype).reshape(loss.shape)
    return list(torch.autograd.grad((loss * weights).sum(), trained))


CASES = [
    # pieces, reduction, label smoothing, scale, soft cap, bias
    (1, "sum", 0.0, 1.0, 0.0, True),
    (4, "sum", 0.0, 1.0, 0.0, False),
    (4, "none", 0.1, 1.0, 0.0, True),
    (7, "sum", 0.1, 0.25, 2.0, True),
    (50, "none", 0.0, 1.0, 3.0, False),
]


@pytest.mark.parametrize(("pieces", "reduction", "smoothing", "scale", "softcap", "bias"), CASES)
def test_equals_both_ops(
    pieces: int, reduction: str, smoothing: float, scale: float, softcap: float, bias: bool
) -> None:
    given = operands(torch.float64, bias)
    number = {"none": 0, "sum": 2}[reduction]
    options = {"label_smoothing": smoothing, "scale": scale, "softcap": softcap, "pieces": pieces}
    found = LINEAR_CROSS_ENTROPY(*given, reduction=number, **options)
    expected = eager(given, reduction, smoothing, scale, softcap, None)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    for one, other in zip(gradients(found, given), gradients(expected, given), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


def test_half_precision_is_as_good_as_whole_logits() -> None:
    exact = operands(torch.float64)
    given = operands(torch.bfloat16)
    expected = gradients(eager(exact, "sum", 0.0, 1.0, 0.0, None), exact)
    options: dict[str, Any] = {"reduction": 2, "dtype": torch.float32}
    found = LINEAR_CROSS_ENTROPY(*given, **options, pieces=8)
    whole = eager(given, "sum", 0.0, 1.0, 0.0, torch.float32)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, whole, rtol=1e-6, atol=0)
    for one, other, right in zip(gradients(found, given), gradients(whole, given), expected, strict=True):
        assert one.dtype is torch.bfloat16
        # The part of each piece is rounded, then the sum, so errors have two sources instead of one.
        errors = [float((each.double() - right).norm()) for each in (one, other)]
        assert errors[0] <= 1.5 * errors[1], errors


def test_pieces_cover_the_rows() -> None:
    for rows in range(9):
        for pieces in range(1, 12):
            found = list(piece_sizes(rows, pieces))
            assert [row for first, size in found for row in range(first, first + size)] == list(range(rows))
            assert len(found) <= pieces


def test_no_rows() -> None:
    given = operands(torch.float64, rows=0)
    loss = LINEAR_CROSS_ENTROPY(*given, reduction=2, pieces=4)
    assert loss.item() == 0
    assert all(not one.any() for one in gradients(loss, given))


def test_a_target_beyond_the_classes_is_an_error() -> None:
    given = operands(torch.float64)
    given[3] = torch.full((ROWS,), CLASSES)
    with pytest.raises(RuntimeError, match="a target is not one of 11 classes"):
        LINEAR_CROSS_ENTROPY(*given, reduction=2)


def test_a_second_derivative_is_an_error() -> None:
    given = operands(torch.float64)
    loss = LINEAR_CROSS_ENTROPY(*given, reduction=2)
    with pytest.raises(RuntimeError, match="a loss in pieces has no second derivative"):
        torch.autograd.grad(loss, [given[0]], create_graph=True)


def peak_bytes(pieces: int) -> int:
    """Return the most bytes that a forward and backward allocate at a time."""
    rows, classes = 512, 256
    x = torch.randn(rows, 8).requires_grad_()
    weight, target = torch.randn(classes, 8).requires_grad_(), torch.randint(0, classes, (rows,))
    with LiveBytes() as counter:
        if pieces:
            loss = LINEAR_CROSS_ENTROPY(x, weight, None, target, reduction=2, pieces=pieces)
        else:
            loss = functional.cross_entropy(functional.linear(x, weight), target, reduction="sum")
        loss.backward()
    return counter.peak


def test_memory() -> None:
    logits = 512 * 256 * 4
    assert peak_bytes(0) > 3 * logits
    # The product and its softmax, beside some numbers of each row.
    assert 2 * logits < peak_bytes(1) < 2.3 * logits
    assert peak_bytes(16) < 0.4 * logits


def test_a_shard_may_have_no_class_that_counts() -> None:
    """Classes that a bias excludes, as those of a padded vocabulary, on one of two shards."""
    rows, weight, bias, target = operands(torch.float64)
    assert rows is not None
    assert weight is not None
    assert bias is not None
    target = target % 5  # type: ignore[operator]
    excluded = torch.where(torch.arange(CLASSES) < 5, bias.detach(), float("-inf"))
    halves = [(weight[:5], excluded[:5]), (weight[5:], excluded[5:])]
    given = rows, weight
    expected = functional.cross_entropy(functional.linear(rows, weight, excluded), target, reduction="sum")
    statistics = [
        _RowStatistics.apply(rows, *half, target - start, LogitsForm(), 3, 1.0, 0.0)  # type: ignore[no-untyped-call]
        for half, start in zip(halves, (0, 5), strict=True)
    ]
    sums, chosen = (torch.stack(each) for each in zip(*statistics, strict=True))
    found = (sums.logsumexp(0) - chosen.sum(0)).sum()
    torch.testing.assert_close(found, expected)
    for one, other in zip(torch.autograd.grad(found, given), torch.autograd.grad(expected, given), strict=True):
        torch.testing.assert_close(one, other)
