"""What a parallel module has of its model, and what it answers where it has it not."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError
from tests.runtime.launcher import launch


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.heads = nn.ModuleDict({"first": nn.Linear(8, 8)})
        self.config = {"layers": 2}
        self.scale = 2.0
        self.table = torch.ones(2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x if getattr(layer, "is_flat", False) else layer(x)
        return (self.heads["first"](x) * self.scale).square().mean()

    def generate(self, x: Tensor) -> Tensor:
        return self(x)  # type: ignore[no-any-return]

    def hidden(self, x: Tensor) -> Tensor:
        return self.layers[0](x)  # type: ignore[no-any-return]

    def rescale(self, scale: float) -> None:
        self.scale = scale

    @property
    def width(self) -> int:
        return self.layers[0].weight.shape[0]

    @classmethod
    def make(cls) -> Named:
        return cls()


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except AutoparError as error:
        return str(error) if "fix: " in str(error) else "an error without a fix"
    return "no error"


def set_on_both(p: Any, twin: Any, model: Any, x: Tensor) -> list[bool]:
    """The graph follows what is set, by a method or by name, on the module or on a part of it; a copy does not."""
    before = model(x)
    found = []
    for name, value in (("scale", 3.0), ("is_flat", True)):
        for one in (p, model):
            one.rescale(value) if name == "scale" else setattr(one.layers[1], name, value)
        found.append(torch.allclose(p(x), model(x)) and not torch.allclose(p(x), before))
        before = model(x)
    latest = p._plans.latest
    p.scale, p.layers[1].is_flat = 3.0, True  # as they are
    p(x)
    found.append(p._plans.latest is latest)
    model.scale, model.layers[1].is_flat = 2.0, False
    return [*found, torch.allclose(twin(x), model(x))]


def ask() -> dict[str, Any]:
    torch.manual_seed(0)
    model, x = Named(), torch.randn(4, 8)
    p: Any = autopar.parallelize(model, "dp=2", (x,), layout="ddp")
    wrapped = nn.parallel.DistributedDataParallel(copy.deepcopy(model))
    errors = {
        "is a parallel module already": (
            lambda: autopar.parallelize(p, "dp=2", (x,), layout="ddp"),
            lambda: autopar.parallelize(nn.Sequential(p), "dp=2", (x,), layout="ddp"),
            lambda: autopar.parallelize(p.layers[0], "dp=2", (x,), layout="ddp"),
            lambda: autopar.plan(p, "dp=2", (x,), layout="ddp"),
            lambda: autopar.trace(p, (x,)),
        ),
        "is wrapped in DistributedDataParallel": (lambda: autopar.parallelize(wrapped, "dp=2", (x,), layout="ddp"),),
        "is a constant of the graph": (lambda: p.table,),
        "cannot take the tensor": (lambda: setattr(p, "scale", x), lambda: setattr(p.layers[0], "extra", x)),
        "it cannot take": (
            lambda: p.add_module("new", nn.Linear(2, 2)),
            lambda: setattr(p, "layers", nn.ModuleList()),
            lambda: p.layers.add_module("2", nn.Linear(2, 2)),
            lambda: p.register_buffer("new", torch.zeros(2)),
            lambda: setattr(p, "new", nn.Parameter(torch.zeros(2))),
            lambda: p.layers[0].register_parameter("new", nn.Parameter(torch.zeros(2))),
            lambda: p.layers.append(nn.Linear(2, 2)),
        ),
        "apply would find no": (lambda: p.apply(print), lambda: p.layers.apply(print)),
        "has no forward": (lambda: p.layers(x), lambda: p.heads(x)),
    }
    found = {text: [text in error_of(call) for call in calls] for text, calls in errors.items()}
    p.note = 1  # is the user's own
    p.layers[1].weight = nn.Parameter(p.layers[1].weight.detach() * 2)
    model.layers[1].weight = nn.Parameter(model.layers[1].weight.detach() * 2)
    twin = copy.deepcopy(p)
    sequence: Any = autopar.parallelize(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), "dp=2", (x,), layout="ddp")
    found["there"] = [
        p.config == {"layers": 2} and p.scale == 2.0 and p.note == 1,
        not hasattr(p, "nothing") and not hasattr(p.layers[0], "nothing") and not hasattr(p, "_nothing"),
        p.width == 8 and p.layers[0].in_features == 8 and type(p.make()) is Named,
        torch.allclose(p.generate(x), model(x)),
        torch.allclose(p.hidden(x).full_tensor(), model.hidden(x)) and p.layers[0](x).shape == x.shape,
        [isinstance(one, kind) for one, kind in ((p, Named), (p.layers[0], nn.Linear), (p, nn.Linear))]
        == [True, True, False],
        isinstance(p, autopar.ParallelModule) and type(p).generate is Named.generate,
        str(inspect.signature(p.forward)) == "(x: 'Tensor') -> 'Tensor'",
        len(p.layers) == 2 and [*p.layers] == [p.layers[0], p.layers[-1]] and p.layers[:1] == [p.layers[0]],
        [*p.heads] == ["first"] and "first" in p.heads and p.heads["first"] is p.get_submodule("heads.first"),
        [*p.heads.items()] == [("first", p.heads["first"])] and bool(p.layers[0]),
        p.layers[0].weight is p.get_parameter("layers.0.weight"),
        len(twin.layers) == 2 and twin.layers[0] is not p.layers[0],
        sequence[0].weight is sequence.get_parameter("0.weight"),
        torch.allclose(p(x), model(x)) and torch.allclose(twin(x), model(x)),
    ]
    found["set"] = set_on_both(p, twin, model, x)
    return found


def step_with_each_optimizer() -> tuple[str, bool, bool]:
    torch.manual_seed(0)
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    before = torch.optim.SGD(model.parameters(), lr=0.1)
    p = autopar.parallelize(model, "dp=2", (x,), layout="ddp")
    after = torch.optim.SGD(p.parameters(), lr=0.1)
    p(x).square().mean().backward()
    error = error_of(before.step)
    start = p.weight.full_tensor().clone()
    after.step()
    moved = not torch.equal(p.weight.full_tensor(), start)
    # The model may go on by itself, beside the parallel one.
    model(x).square().mean().backward()
    before.step()
    return error, moved, torch.allclose(p.weight.full_tensor(), model.weight)


def test_an_optimizer_of_the_model_itself_is_an_error_where_it_would_do_nothing() -> None:
    for error, moved, is_alike in launch(step_with_each_optimizer, ranks=2):
        assert error.startswith("SGD updates parameters of the model that was passed to parallelize")
        assert "create the optimizer after parallelize" in error
        assert moved
        assert is_alike


def test_each_answer_is_right_or_an_error_with_a_fix() -> None:
    for found in launch(ask, ranks=2):
        for text, answers in found.items():
            assert all(answers), (text, answers)
