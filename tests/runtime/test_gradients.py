"""Gradients reach whoever wants them: `.grad`, hooks, `torch.autograd.grad`, a second backward; and small totals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from examples.gpt import gpt
from tests.runtime.launcher import in_turn, launch
from tests.runtime.sent import Counted
from tests.runtime.training import gap, gradients, whole, worst


def pair() -> tuple[nn.Module, Any, list[dict[str, Tensor]]]:
    torch.manual_seed(0)
    model, inputs = gpt(batch=4, seq=8, vocab=24, d_model=16)
    model = model.double()
    other = {name: (value + 1) % 24 for name, value in inputs.items()}
    return model, autopar.parallelize(model, "dp=2", inputs, layout="ddp"), [inputs, other]


def two_forwards_one_backward() -> float:
    """The gradients of both are added up, each when it has come."""
    model, parallel, batches = pair()
    worsts = []
    for _ in range(3):
        for each in (model, parallel):
            each.zero_grad()
            (each(**batches[0]) + 2 * each(**batches[1])).backward()
        worsts.append(worst(gradients(parallel), gradients(model)))
    return max(worsts)


def backward_twice() -> float:
    model, parallel, batches = pair()
    for each in (model, parallel):
        loss = each(**batches[0])
        loss.backward(retain_graph=True)
        loss.backward()
    return worst(gradients(parallel), gradients(model))


def beside_the_module() -> float:
    """A penalty on the parameters themselves, which autograd adds to what is there."""
    model, parallel, batches = pair()
    for each in (model, parallel):
        penalty = sum(parameter.square().sum() for parameter in each.parameters())
        penalty = penalty.full_tensor() if hasattr(penalty, "full_tensor") else penalty
        (each(**batches[0]) + 0.1 * penalty).backward()
    return worst(gradients(parallel), gradients(model))


def hooks() -> dict[str, list[float]]:
    """What hooks of all kinds see on one parameter, and what is in `.grad` after it; the second is doubled by one."""
    model, parallel, batches = pair()
    found: dict[str, list[float]] = {"model": [], "parallel": []}
    for name, each in (("model", model), ("parallel", parallel)):
        first, second = each.get_parameter("norm.weight"), each.get_parameter("norm.bias")
        first.register_post_accumulate_grad_hook(lambda p, name=name: found[name].append(float(whole(p.grad).sum())))
        second.register_hook(lambda gradient: 2 * gradient)
        second.register_hook(lambda gradient, name=name: found[name].append(float(whole(gradient).sum())))
        for _ in range(2):
            each(**batches[0]).backward()
        found[name].append(float(whole(second.grad).square().sum()))
    return found


def only_some() -> tuple[list[str], list[str], float]:
    """`inputs=` of a backward, and `torch.autograd.grad`, which leaves `.grad` alone."""
    model, parallel, batches = pair()
    names = ["blocks.0.up.weight", "tokens.weight"]
    given = torch.autograd.grad(parallel(**batches[0]), [parallel.get_parameter(name) for name in names])
    after_grad = [name for name, parameter in parallel.named_parameters() if parameter.grad is not None]
    loss = parallel(**batches[0])
    loss.backward(inputs=[parallel.get_parameter(name) for name in names])
    after_some = [name for name, parameter in parallel.named_parameters() if parameter.grad is not None]
    model(**batches[0]).backward()
    expected = {name: gradients(model)[name] for name in names}
    found = dict(zip(names, map(whole, given), strict=True))
    return after_grad, after_some, max(worst(found, expected), worst(gradients(parallel), expected))


def another_parameter() -> tuple[bool, bool]:
    """One that is put in the place of another gets the gradients, not the one before."""
    _, parallel, batches = pair()
    parallel(**batches[0]).backward()
    owner = parallel.get_submodule("norm")
    before = owner._parameters["weight"]
    before.grad = None
    owner._parameters["weight"] = after = nn.Parameter(before.detach().clone())
    parallel(**batches[0]).backward()
    return before.grad is None, after.grad is not None


class Penalised(nn.Module):
    """Its weight is read by a product with split rows and, whole, by a penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 5))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).square().sum() + self.weight.pow(3).sum()


def read_in_two_ways() -> tuple[float, dict[str, int], bool]:
    torch.manual_seed(0)
    model, x = Penalised().double(), torch.randn(4, 6, dtype=torch.float64)
    parallel = autopar.parallelize(model, "dp=2", (x,), layout="batch -> dp; * -> none", dims={"x": "batch d_in"})
    model(x).backward()
    with Counted() as sent:
        parallel(x).backward()
    return worst(gradients(parallel), gradients(model)), dict(sent.counts), "all_reduce_start" in parallel.code


class Summed(nn.Module):
    """Two parameters whose sum is used, so that both have the same gradient; the loss is a sum over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(6, 5)), nn.Parameter(torch.randn(6, 5))
        self.out = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out((x @ (self.first + self.second)).tanh()).square().sum()


def one_gradient_for_two(axes: str) -> float:
    torch.manual_seed(0)
    model, x = Summed().double(), torch.randn(4, 6, dtype=torch.float64)
    parallel = autopar.parallelize(model, "dp=2", (x,), layout=axes, dims={"x": "batch d_in"})
    for each in (model, parallel):
        for _ in range(3):
            each(x).backward()
    return worst(gradients(parallel), gradients(model))


def gradient_of_a_gradient() -> tuple[float, float, bool]:
    """Through a loss that is added up over the ranks, squared after it."""
    torch.manual_seed(0)
    model, x = Summed().double(), torch.randn(4, 6, dtype=torch.float64)
    given = x.clone().requires_grad_()
    parallel = autopar.parallelize(model, "dp=2", (given,), layout="ddp", dims={"x": "batch d_in"})
    found = []
    for each in (model, parallel):
        mine = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(each(mine).square(), mine, create_graph=True)
        slope.square().sum().backward()
        found.append(mine.grad)
    return gap(found[1], found[0]), worst(gradients(parallel), gradients(model)), len(parallel.emitted.ends.late) == 1


class Counts(nn.Module):
    """Sums that float64 cannot hold, and one that only some ranks make infinite."""

    def forward(self, numbers: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        return numbers.sum(), scores.sum()


def totals() -> tuple[list[int], list[float]]:
    numbers = torch.tensor([2**60 + 1, 3, 2**60, 5])
    scores = torch.tensor([0.5, 1.0, 2.0, -torch.inf])
    dims = {"numbers": "batch", "scores": "batch"}
    parallel = autopar.parallelize(Counts(), "dp=2", (numbers, scores), layout="batch -> dp", dims=dims)
    found = [parallel(numbers, scores) for _ in range(3)]
    return [int(one) for one, _ in found], [float(other) for _, other in found]


def test_gradients_go_to_whoever_wants_them() -> None:
    functions = (
        two_forwards_one_backward,
        backward_twice,
        beside_the_module,
        hooks,
        only_some,
        another_parameter,
        read_in_two_ways,
        gradient_of_a_gradient,
        totals,
    )
    for found in launch(in_turn, *((function, ()) for function in functions), ranks=2):
        for name in ("two_forwards_one_backward", "backward_twice", "beside_the_module"):
            assert found[name] < 1e-12, name
        expected, given = found["hooks"]["model"], found["hooks"]["parallel"]
        assert len(expected) == len(given) == 5
        assert sorted(given) == pytest.approx(sorted(expected), rel=1e-9)
        after_grad, after_some, error = found["only_some"]
        assert after_grad == []
        assert sorted(after_some) == ["blocks.0.up.weight", "tokens.weight"]
        assert error < 1e-12
        assert found["another_parameter"] == (True, True)
        error, counts, waits = found["read_in_two_ways"]
        assert error < 1e-12
        assert counts == {"all_reduce": 2}, "the gradient of the product, and the loss before the penalty is added"
        assert waits, "before the other gradient is added"
        *errors, is_total = found["gradient_of_a_gradient"]
        assert max(errors) < 1e-12
        assert is_total
        assert found["totals"] == ([2**61 + 9] * 3, [-float("inf")] * 3)


@pytest.mark.parametrize("layout", ["ddp", "batch -> none; * -> none"])
def test_a_gradient_that_two_parameters_share_is_added_up_for_each(layout: str) -> None:
    assert max(launch(one_gradient_for_two, layout, ranks=2)) < 1e-12
