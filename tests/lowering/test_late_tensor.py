"""A tensor whose values come when somebody looks: what looks, and what it is afterwards."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.lowering.hoisted_sums import wrapped
from autopar.lowering.modules.late_tensor import LateTensor


class Tripled(torch.autograd.Function):
    """Three times a number, when somebody looks; its gradient is what it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, arrived: list[int]) -> Tensor:
        value = 3 * x.detach()

        def arrival() -> Tensor:
            arrived.append(1)
            return value

        return LateTensor.of(x, arrival)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def made() -> tuple[Tensor, Tensor, list[int]]:
    weight, arrived = torch.tensor(2.0, requires_grad=True), list[int]()
    return weight, Tripled.apply(weight * 5, arrived), arrived  # type: ignore[no-untyped-call]


def test_a_backward_does_not_look() -> None:
    weight, loss, arrived = made()
    assert loss.requires_grad
    assert loss.grad_fn is not None
    loss.backward()
    assert weight.grad == 5
    assert arrived == []
    assert loss.item() == 30
    assert arrived == [1]
    weight, loss, arrived = made()
    assert torch.autograd.grad(loss, weight) == (torch.tensor(5.0),)
    assert arrived == []


def saved(x: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(x.detach(), file)
    file.seek(0)
    found: Tensor = torch.load(file)
    return found


LOOKS: dict[str, tuple[Callable[[Tensor], Any], Any]] = {
    "item": (lambda x: x.item(), 30.0),
    "float": (lambda x: float(x.detach()), 30.0),
    "format": (lambda x: f"{x:.1f}", "30.0"),
    "numpy": (lambda x: x.detach().numpy().item(), 30.0),
    "detach": (lambda x: x.detach().add(1).item(), 31.0),
    "clone": (lambda x: x.clone().item(), 30.0),
    "arithmetic": (lambda x: (x / 2).item(), 15.0),
    "comparison": (lambda x: bool(x > 29), True),
    "in place": (lambda x: x.detach().mul_(2).item(), 60.0),
    "an op": (lambda x: torch.ops.aten.mul.Tensor(x, 2).item(), 60.0),
    "a list": (lambda x: torch.stack([x, x]).sum().item(), 60.0),
    "a keyword": (lambda x: torch.add(input=x, other=x).item(), 60.0),
    "saved": (lambda x: saved(x).item(), 30.0),
    "copied": (lambda x: copy.deepcopy(x.detach()).item(), 30.0),
    "data": (lambda x: x.data.item(), 30.0),
    "compiled": (lambda x: torch.compile(lambda y: y * 2, backend="eager")(x).item(), 60.0),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # as of any, in torch.compile
@pytest.mark.parametrize("name", LOOKS)
def test_whoever_looks_sees_the_value(name: str) -> None:
    look, expected = LOOKS[name]
    weight, loss, arrived = made()
    assert look(loss) == expected
    assert arrived == [1]
    assert type(loss) is Tensor, "an ordinary tensor from then on"
    loss.backward()
    assert weight.grad == 5


def test_what_is_done_with_it_has_a_gradient() -> None:
    weight, loss, _ = made()
    (loss * loss).backward()
    assert weight.grad == 2 * 30 * 5
    weight, loss, arrived = made()
    loss.register_hook(lambda gradient: gradient * 7)  # type: ignore[no-untyped-call]
    loss.backward()
    assert weight.grad == 35
    assert loss.item() == 30
    assert arrived == [1]


def test_whole_numbers_run_over_as_those_of_tensors_do() -> None:
    for numbers in ([2**62, 2**62], [2**62, 2**62, 2**62, 2**62], [-(2**62), -(2**62), -1], [3, -5]):
        assert wrapped(sum(numbers)) == torch.tensor(numbers).sum()
    assert wrapped(2.5) == 2.5


def test_several_numbers_of_another_type() -> None:
    for dtype in (torch.int64, torch.complex64, torch.bfloat16):
        x = torch.tensor([[1, 2]], dtype=dtype)
        late = LateTensor.of(x, lambda x=x: x[0] * 2)  # type: ignore[misc]
        assert torch.equal(late + 1, x * 2 + 1)
        assert (late.dtype, late.shape) == (dtype, (1, 2))


def test_in_inference_mode() -> None:
    with torch.inference_mode():
        assert (LateTensor.of(torch.zeros(()), lambda: 4.0) + 1).item() == 5


def test_an_arrival_that_fails_is_told() -> None:
    def arrival() -> Tensor:
        raise ValueError("nobody came")

    late = LateTensor.of(torch.zeros(()), arrival)
    with pytest.raises(ValueError, match="nobody came"):
        late.item()
    assert torch.isnan(late.detach()), "and no number that looks like a result"
