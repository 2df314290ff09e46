"""Everything the tracer refuses names the line of the model, the reason, and a fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autopar.errors import TraceError
from autopar.tracing.export.export import export


class Net(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.layer = nn.Linear(4, 4)
        self.register_buffer("state", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, self.layer(x))


def refused(model: nn.Module, inputs: Any = None) -> str:
    with pytest.raises(TraceError) as caught:
        export(model, (torch.randn(3, 4),) if inputs is None else inputs)
    return str(caught.value)


def branches(net: Net, x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        return x
    return -x


def loops(net: Net, x: torch.Tensor) -> torch.Tensor:
    return x.repeat(int(x.sum().item()), 1)


def numbers(net: Net, x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()


def selects(net: Net, x: torch.Tensor) -> torch.Tensor:
    return x[x > 0]


def lists(net: Net, x: torch.Tensor) -> Any:
    return {"values": x.tolist()}


class Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mask = torch.rand_like(x) > 0.5
        return x * ctx.mask

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.mask


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 3


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, options: dict[str, int]) -> torch.Tensor:
        ctx.factor = options["factor"]
        return x * ctx.factor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.factor, None


def other_device(net: Net, x: torch.Tensor) -> torch.Tensor:
    return x + torch.ones(4, device="meta")


def random_function(net: Net, x: torch.Tensor) -> torch.Tensor:
    return Dropped.apply(x)


def custom_function(net: Net, x: torch.Tensor) -> torch.Tensor:
    return Scaled.apply(x, {"factor": 2})


def tensor_hook(net: Net, x: torch.Tensor) -> torch.Tensor:
    x.register_hook(lambda gradient: gradient * 2)
    return x


def accumulation_hook(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.layer.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return x


def inner_gradient(net: Net, x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(x.sum(), net.layer.weight)[0]


def inner_backward(net: Net, x: torch.Tensor) -> torch.Tensor:
    x.sum().backward()
    return x


def hidden_change(net: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        x.mul_(2)
    return x


def hidden_change_of_a_view(net: Net, x: torch.Tensor) -> torch.Tensor:
    x.detach()[0].mul_(2)
    return x


def changed_parameter(net: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        net.layer.weight.mul_(0.9)
    return x


def data(net: Net, x: torch.Tensor) -> torch.Tensor:
    return x + x.data.exp()


def grows(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.state = torch.cat([net.state, x.flatten()])
    return x


def generator(net: Net, x: torch.Tensor) -> Any:
    return (row for row in [x])


def tensor_set(net: Net, x: torch.Tensor) -> Any:
    return {"rows": {x}}


def raises(net: Net, x: torch.Tensor) -> torch.Tensor:
    raise KeyError("no such thing")


def wrong_shape(net: Net, x: torch.Tensor) -> torch.Tensor:
    return x @ torch.zeros(3, 3)


def experts(net: Net, x: torch.Tensor) -> torch.Tensor:
    rows, columns = torch.where(x > 0)
    return x[rows, columns]


@pytest.mark.parametrize(
    ("function", "line", "problem", "fix"),
    [
        (branches, "if x.sum() > 0:", "the control flow of the forward depends on the data in a tensor", "torch.where"),
        (loops, "return x.repeat(int(x.sum().item()), 1)", "depends on the data in a tensor", "torch.where"),
        (numbers, "return x * x.sum().item()", "a number, depends on the data in a tensor", "keep sizes fixed"),
        (selects, "return x[x > 0]", "the size of a tensor, or a number, depends on the data", "use a mask"),
        (experts, "rows, columns = torch.where(x > 0)", "the size of a tensor, or a number, depends", "use a mask"),
        (lists, None, "its result contains a number that depends on the data in a tensor (at values.0.0)", "return"),
        (
            random_function,
            "ctx.mask = torch.rand_like(x) > 0.5",
            "the backward of the torch.autograd.Function Dropped would be lost: it draws random numbers",
            "torch.library.custom_op, with register_fake and register_autograd",
        ),
        (
            custom_function,
            'return Scaled.apply(x, {"factor": 2})',
            "the backward of the torch.autograd.Function Scaled would be lost: it has an argument of type dict",
            "torch.library.custom_op, with register_fake and register_autograd",
        ),
        (
            tensor_hook,
            "x.register_hook(lambda gradient: gradient * 2)",
            "the hook set by Tensor.register_hook would be lost",
            "torch.library.custom_op",
        ),
        (
            accumulation_hook,
            "net.layer.weight.register_post_accumulate_grad_hook(lambda parameter: None)",
            "the hook set by Tensor.register_post_accumulate_grad_hook would be lost",
            "torch.library.custom_op",
        ),
        (
            inner_gradient,
            "return torch.autograd.grad(x.sum(), net.layer.weight)[0]",
            "the forward itself computes gradients, by torch.autograd.grad",
            "torch.library.custom_op",
        ),
        (inner_backward, "x.sum().backward()", "the forward itself computes gradients, by backward()", "custom_op"),
        (hidden_change, "x.mul_(2)", "changed in place where no gradient is recorded", "compute a new tensor"),
        (hidden_change_of_a_view, "x.detach()[0].mul_(2)", "changed in place where no gradient", "a new tensor"),
        (changed_parameter, "net.layer.weight.mul_(0.9)", "changed in place where no gradient", "a new tensor"),
        (data, None, "bypasses the graph: through .data", "use detach() instead of .data"),
        (
            grows,
            None,
            "the buffer 'state' of shape [2] and dtype torch.float32 is replaced by one of shape [14]",
            "its final shape",
        ),
        (generator, None, "its result contains a generator, which can be read only once: use a tuple", "return"),
        (tensor_set, None, "its result contains a set of tensors, which has no order", "return tensors"),
        (raises, 'raise KeyError("no such thing")', "it raised KeyError: 'no such thing'", "outside of autopar"),
        (
            other_device,
            'return x + torch.ones(4, device="meta")',
            "an op gets tensors on two devices, cpu and meta",
            "move the model and its inputs to one device",
        ),
        (wrong_shape, "return x @ torch.zeros(3, 3)", "it raised RuntimeError: a and b must have same", "inputs"),
    ],
)
def test_refused_with_the_line_and_the_fix(
    function: Callable[..., Any],
    line: str | None,
    problem: str,
    fix: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    text = refused(Net(function))
    assert text.startswith("Net cannot be traced: ")
    first, *middle, last = text.splitlines()
    assert problem in first
    assert last.startswith("fix: ")
    assert fix in last
    if line is not None:
        (where,) = middle
        assert where.startswith("  at ")
        assert "test_export_errors.py:" in where
        assert where.endswith(f": {line}")
    assert capfd.readouterr() == ("", ""), "torch prints nothing of its own"


def test_the_cause_is_kept() -> None:
    with pytest.raises(TraceError) as caught:
        export(Net(raises), (torch.randn(3, 4),))
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_mistake_inside_a_layer_of_torch_names_the_layer() -> None:
    text = refused(nn.Linear(3, 3))
    assert "Linear cannot be traced: it raised RuntimeError" in text
    assert "linear.py:" in text


def test_hooks_set_before_the_trace() -> None:
    model = Net(lambda net, x: x)
    handle = model.layer.register_full_backward_hook(lambda *_: None)
    assert refused(model).splitlines()[0] == (
        "Net cannot be traced: the module 'layer' (Linear) has a backward hook, which the traced graph would not call"
    )
    handle.remove()
    model.layer.bias.register_hook(lambda gradient: gradient)
    assert refused(model).splitlines() == [
        "Net cannot be traced: the parameter 'layer.bias' has a gradient hook, which the traced graph would not call",
        "fix: remove the hook before tracing",
    ]


def test_gradients_enabled_inside_a_call_without_them() -> None:
    def enables(net: Net, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return x * 2

    with torch.no_grad():
        text = refused(Net(enables))
    assert "the forward enables gradients inside a call that runs without them" in text
    assert "with torch.enable_grad():" in text or "return x * 2" in text


def test_autocast_on_meta() -> None:
    def casts(net: Net, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return net.layer(x)

    x = torch.randn(3, 4, device="meta")
    text = refused(Net(casts).to("meta"), (x,))
    assert "autocast does nothing on the meta device, so the trace would lack its casts" in text
    assert "model.to(torch.bfloat16)" in text
    with torch.autocast("cpu", torch.bfloat16):
        assert "autocast does nothing on the meta device" in refused(Net(lambda net, x: x).to("meta"), (x,))


@pytest.mark.parametrize(
    ("inputs", "problem"),
    [
        ((), "do not fit Net.forward(x): missing a required argument: 'x'. Given: nothing."),
        ({}, "do not fit Net.forward(x): missing a required argument: 'x'. Given: nothing."),
        ((1, 2), "do not fit Net.forward(x): too many positional arguments. Given: 2 positional."),
        ({"x": 1, "y": 2}, "do not fit Net.forward(x): got an unexpected keyword argument 'y'. Given: x, y."),
        (
            torch.zeros(1),
            "inputs must be a tuple of positional or a dict of keyword arguments, got a Tensor: write (x,)",
        ),
        ([1], "inputs must be a tuple of positional or a dict of keyword arguments, got a list: use a tuple or a dict"),
        ((iter([1]),), "the argument 'x' of Net holds a list_iterator, which can be read only once: use a tuple"),
    ],
)
def test_inputs_that_do_not_fit(inputs: Any, problem: str) -> None:
    assert problem in refused(Net(lambda net, x: x), inputs)


def test_after_an_error_the_next_trace_works() -> None:
    refused(Net(custom_function))
    model = Net(lambda net, x: x)
    exported = export(model, (torch.randn(3, 4),))
    assert len(exported.placeholders) == 4
    x = torch.randn(3, requires_grad=True)
    Tripled.apply(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3, 3, 3]
