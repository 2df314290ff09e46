"""The traced graph gives the outputs, the gradients and the side effects of the model: one small model per trap."""

from __future__ import annotations

import copy
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

import autopar
from autopar.errors import AutoparWarning
from autopar.ir.exported import Exported
from autopar.ir.interpreter import TracedModule
from autopar.tracing.annotations import named
from autopar.tracing.export.export import export

aten = torch.ops.aten


class Net(nn.Module):
    """Two layers and a function of them, which the test gives."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.first = nn.Linear(4, 4, dtype=torch.float64)
        self.second = nn.Linear(4, 4, dtype=torch.float64)
        self.register_buffer("count", torch.zeros(4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def example() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(3, 4, dtype=torch.float64)


def ops(exported: Exported) -> list[Any]:
    return [node.target for node in exported.graph_module.graph.nodes if node.op == "call_function"]


def step(module: nn.Module, x: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    outputs = [leaf for leaf in tree_leaves(module(x)) if isinstance(leaf, torch.Tensor)]
    loss = sum((out * torch.arange(out.numel()).view_as(out)).sum() for out in outputs if out.requires_grad)
    wanted = [x, *module.parameters()]
    return outputs, list(torch.autograd.grad(loss, wanted, allow_unused=True))


def assert_equal(function: Callable[..., Any], train: bool = False) -> Exported:
    torch.manual_seed(2)
    model = Net(function).train(train)
    original = copy.deepcopy(model)
    exported = export(model, (example(),))
    traced = TracedModule(model, exported)
    for _ in range(2):
        expected, gradients = step(original, example())
        outputs, traced_gradients = step(traced, example())
        for mine, theirs in zip(outputs, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
        for mine, theirs in zip(traced_gradients, gradients, strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
        for mine, theirs in zip(traced.buffers(), original.buffers(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    assert any(gradient is not None and gradient.abs().max() > 0 for gradient in gradients)
    return exported


def no_grad(net: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = net.first(x).abs().mean()
    return net.second(x) * scale


def enable_grad_inside(net: Net, x: torch.Tensor) -> torch.Tensor:
    y = net.first(x)
    with torch.no_grad():
        a = y * 2
        with torch.enable_grad():
            b = net.second(y) + a
        c = net.second(b)
    return y + b + c


def no_grad_in_autocast(net: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            a = net.first(x)
        b = net.second(x) * a
    return b


@torch.no_grad()
def _frozen(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net.first(x)


def decorated(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net.second(x) + _frozen(net, x)


def inference_mode(net: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        frozen = net.first(x)
    return net.second(x) + frozen


def set_grad_enabled(net: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.set_grad_enabled(False):
        frozen = net.first(x)
    with torch.set_grad_enabled(True):
        return net.second(x) + frozen


def explicit_detach(net: Net, x: torch.Tensor) -> torch.Tensor:
    y = net.first(x)
    return net.second(y) * y.detach() + (x - x.detach())


def buffer_under_no_grad(net: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        net.count.mul_(0.9).add_(x.mean(0))
    return net.first(x) * net.count


@pytest.mark.parametrize(
    "function",
    [
        no_grad,
        enable_grad_inside,
        no_grad_in_autocast,
        decorated,
        inference_mode,
        set_grad_enabled,
        explicit_detach,
        buffer_under_no_grad,
    ],
)
def test_gradients_stop_where_the_model_stops_them(function: Callable[..., Any]) -> None:
    assert_equal(function)


def test_a_no_grad_region_keeps_its_place_in_the_model() -> None:
    nodes = assert_equal(no_grad).graph_module.graph.nodes
    frozen = next(node for node in nodes if node.target is aten.linear.default)
    assert frozen.meta["origin"].module_path == "first"
    assert frozen.meta["origin"].source.startswith("test_export.py:")
    assert frozen.meta["origin"].source_code == "scale = net.first(x).abs().mean()"


def autocast(net: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            frozen = net.first(x)
        y = net.second(x) * frozen
        with torch.autocast("cpu", enabled=False):
            return net.first(y.float())


def test_autocast_inside_the_model_becomes_casts() -> None:
    model = Net(autocast).float()
    x = example().float()
    exported = export(model, (x,))
    assert ops(exported).count(aten._to_copy.default) >= 4
    torch.testing.assert_close(TracedModule(model, exported)(x), model(x), rtol=0, atol=0)
    expected, gradients = step(model, x)
    outputs, traced_gradients = step(TracedModule(model, exported), x)
    assert outputs[0].dtype == expected[0].dtype
    for mine, theirs in zip(traced_gradients, gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_autocast_around_the_call_becomes_casts() -> None:
    model = Net(lambda net, x: net.first(x)).float()
    x = example().float()
    with torch.autocast("cpu", torch.bfloat16):
        exported = export(model, (x,))
        assert TracedModule(model, exported)(x).dtype == torch.bfloat16
        torch.testing.assert_close(TracedModule(model, exported)(x), model(x), rtol=0, atol=0)
    assert aten._to_copy.default in ops(exported)


def inplace(net: Net, x: torch.Tensor) -> torch.Tensor:
    y = net.first(x).clone()
    y[:, 0] = 0.5
    y[1:].mul_(net.second(x)[1:])
    y.add_(1).relu_()
    return y


def zeroed(net: Net, x: torch.Tensor) -> torch.Tensor:
    y = net.first(x)
    z = torch.zeros_like(y)
    z.copy_(net.second(x)[0])
    w = y.clone()
    w[0].zero_()
    w[1].fill_(2.0)
    return y * z + w


def accumulated(net: Net, x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(5, 4, dtype=x.dtype)
    out.index_add_(0, torch.tensor([0, 4, 2]), net.first(x))
    out.masked_fill_(out > 1, 0.25)
    return net.second(out)


def strided(net: Net, x: torch.Tensor) -> torch.Tensor:
    y = net.first(x).view(3, 2, 2).transpose(1, 2).contiguous().view(3, 4)
    return net.second(y.t().contiguous().view(3, 4))


def heads(net: Net, x: torch.Tensor) -> torch.Tensor:
    q, k, v = (part.unflatten(-1, (2, 2)).transpose(0, 1) for part in (net.first(x), net.second(x), x))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)


def several_results(net: Net, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    values, indices = net.first(x).sort(-1)
    top, _ = net.second(x).topk(2)
    a, b = values.chunk(2, -1)
    return a * b, indices, top, values.max(), torch.tensor([1.0, 2.0])


def typed(net: Net, x: torch.Tensor) -> torch.Tensor:
    narrow = net.first(x).float().type_as(x.float())
    made = narrow.new_zeros(3, 1) + x.new_ones(1) * x.new_full((3, 1), 2.0)
    return net.second(x).type_as(x) + narrow.type_as(x) + made


def complex_numbers(net: Net, x: torch.Tensor) -> torch.Tensor:
    spectrum = torch.fft.rfft(net.first(x), dim=-1)
    low = torch.zeros_like(spectrum)
    low[:, :2] = spectrum[:, :2].conj()
    low[0] = spectrum[1]
    return net.second(torch.fft.irfft(low.conj(), n=4, dim=-1))


def distribution(net: Net, x: torch.Tensor) -> torch.Tensor:
    """Its arguments are checked by their values."""
    return torch.distributions.Normal(net.first(x), F.softplus(net.second(x))).log_prob(x)


@pytest.mark.parametrize(
    "function",
    [inplace, zeroed, accumulated, strided, heads, several_results, typed, complex_numbers, distribution],
)
def test_ops_that_need_care(function: Callable[..., Any]) -> None:
    assert_equal(function)


def test_no_view_and_no_copy_is_left() -> None:
    for function in (strided, zeroed):
        targets = ops(export(Net(function), (example(),)))
        assert not {aten.view.default, aten._unsafe_view.default, aten.copy.default, aten.alias.default} & set(targets)


def test_of_a_tensor_that_gives_its_type_only_the_type_is_left() -> None:
    exported = export(Net(typed), (example(),))
    assert aten.type_as.default not in ops(exported)
    assert ops(exported).count(aten._to_copy.default) == 2, "where the type changes"
    assert not {aten.new_zeros.default, aten.new_ones.default, aten.new_full.default} & set(ops(exported))


def dropout(net: Net, x: torch.Tensor) -> torch.Tensor:
    y = F.dropout(net.first(x), 0.3, net.training)
    F.dropout(y, 0.5, net.training)  # unused, but it draws numbers
    return F.dropout(net.second(y), 0.2, net.training) + torch.rand_like(x)


@pytest.mark.parametrize("train", [False, True])
def test_random_numbers_are_drawn_as_in_the_model(train: bool) -> None:
    assert_equal(dropout, train)


def counted(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.count = net.count + x.mean(0)
    return net.first(x) * net.count


def test_a_replaced_buffer_is_written_back() -> None:
    exported = assert_equal(counted)
    assert [(mutation.target, mutation.kind) for mutation in exported.mutations] == [("count", "buffer")]


class Replacing(nn.Module):
    """Buffers that are changed in place, and several that are replaced, each by what is its own."""

    def __init__(self) -> None:
        super().__init__()
        for number, name in enumerate("abcd"):
            self.register_buffer(name, torch.full((2,), float(number), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.a.add_(x)
        self.b = self.b + 2 * x
        self.c = self.c + 3 * x
        self.d = self.d + 4 * x
        return x * self.d


def test_several_replaced_buffers_are_written_back() -> None:
    x = torch.randn(2, dtype=torch.float64)
    model, other = Replacing(), Replacing()
    traced = TracedModule(other, export(other, (x,)))
    for _ in range(2):
        assert torch.equal(traced(x), model(x))
    for name, buffer in model.named_buffers():
        assert torch.equal(other.get_buffer(name), buffer), name


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(4, 2)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.body[0](x)[:, :3]).mean((2, 3)))


@pytest.mark.parametrize("train", [False, True])
def test_batch_norm_updates_its_buffers(train: bool) -> None:
    model = Deep().double().train(train)
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    original = copy.deepcopy(model)
    exported = export(model, (x,))
    traced = TracedModule(model, exported)
    for _ in range(2):
        expected, gradients = step(original, x)
        outputs, traced_gradients = step(traced, x)
        torch.testing.assert_close(outputs, expected, rtol=1e-12, atol=1e-12)
        for mine, theirs in zip(traced_gradients, gradients, strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)
    changed = {mutation.target.split(".")[-1] for mutation in exported.mutations}
    assert changed == ({"running_mean", "running_var", "num_batches_tracked"} if train else set())
    for name, buffer in original.named_buffers():
        torch.testing.assert_close(dict(traced.named_buffers())[name], buffer)
    assert original.body[1].num_batches_tracked == (2 if train else 0)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.table.weight
        self.shared = nn.Linear(4, 4)
        self.also = self.shared

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.also(self.shared(self.table(ids))))


def test_tied_weights_have_one_placeholder() -> None:
    model = Tied().double()
    exported = export(model, (torch.tensor([[1, 2, 6]]),))
    assert exported.aliases == {
        "head.weight": "table.weight",
        "also.weight": "shared.weight",
        "also.bias": "shared.bias",
    }
    names = [placeholder.name for placeholder in exported.placeholders if placeholder.kind == "param"]
    assert names == [name for name, _ in model.named_parameters()]
    traced = TracedModule(model, exported)
    assert list(traced.state_dict()) == list(model.state_dict())
    assert [name for name, _ in traced.named_parameters()] == names
    ids = torch.tensor([[3, 0, 3]])
    gradients = [torch.autograd.grad(m(ids).sin().sum(), list(m.parameters())) for m in (model, traced)]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-12, atol=1e-12)
    calls = [node.meta["origin"] for node in exported.graph_module.graph.nodes if node.target is aten.linear.default]
    assert [(origin.module_path, origin.module_call) for origin in calls][:2] == [("shared", 0), ("also", 0)]


def test_placeholders_have_the_names_of_the_model() -> None:
    exported = export(Net(lambda net, x: net.first(x)), (example(),))
    found = [(placeholder.kind, placeholder.name) for placeholder in exported.placeholders]
    assert found == [
        ("param", "first.weight"),
        ("param", "first.bias"),
        ("param", "second.weight"),
        ("param", "second.bias"),
        ("buffer", "count"),
        ("input", "x"),
    ]
    nodes = exported.graph_module.graph.find_nodes(op="placeholder")
    assert [node.name for node in nodes] == [placeholder.node for placeholder in exported.placeholders]
    assert not list(exported.graph_module.graph.find_nodes(op="placeholder"))[4].users  # an unused buffer stays


def test_frozen_parameters_are_known() -> None:
    model = Net(lambda net, x: net.second(net.first(x)))
    model.first.requires_grad_(False)
    known = {p.name: p.requires_grad for p in export(model, (example(),)).placeholders}
    assert known == {
        "first.weight": False,
        "first.bias": False,
        "second.weight": True,
        "second.bias": True,
        "count": False,
        "x": False,
    }


Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Result:
    loss: torch.Tensor
    parts: dict[str, Any]
    note: str = "none"


@dataclass(frozen=True)
class Frozen:
    value: torch.Tensor


class Cache:
    """An object that nobody registered as a pytree."""

    def __init__(self) -> None:
        self.layers: list[torch.Tensor] = []
        self.seen = 0
        self.owner = self  # a cycle


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


def nested(net: Net, x: torch.Tensor) -> Any:
    y = net.first(x)
    both = [y, net.second(y)]
    return Result(
        y.sum(),
        {
            "pair": Pair(y, None),
            "list": both,
            "same": both,
            "frozen": Frozen(y * 2),
            "ordered": OrderedDict(b=y, a=3),
            "slots": Slotted(y + 1),
            "number": 4,
            "max": y.max(-1),
            "input": x,
            "weight": net.first.weight,
        },
    )


def test_nested_outputs_come_back_as_they_were() -> None:
    model = Net(nested)
    traced = TracedModule(model, export(model, (example(),)))
    x = example()
    mine, theirs = traced(x), model(x)
    assert type(mine) is Result
    assert mine.note == "none"
    assert list(mine.parts) == list(theirs.parts)
    assert type(mine.parts["pair"]) is Pair
    assert mine.parts["pair"].right is None
    assert mine.parts["list"] is mine.parts["same"]
    assert type(mine.parts["ordered"]) is OrderedDict
    assert mine.parts["ordered"]["a"] == 3
    assert mine.parts["number"] == 4
    assert type(mine.parts["max"]) is torch.return_types.max
    assert mine.parts["input"] is x
    assert mine.parts["weight"] is model.first.weight
    for get in (
        lambda result: result.loss,
        lambda result: result.parts["pair"].left,
        lambda result: result.parts["list"][1],
        lambda result: result.parts["frozen"].value,
        lambda result: result.parts["ordered"]["b"],
        lambda result: result.parts["slots"].value,
        lambda result: result.parts["max"].values,
    ):
        torch.testing.assert_close(get(mine), get(theirs))


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(
        self, x: torch.Tensor, *rest: torch.Tensor, cache: Cache | None = None, scale: float = 1.0, **more: Any
    ) -> Any:
        y = self.layer(x) * scale
        for other in rest:
            y = y + other
        for _, other in sorted(more.items()):
            y = y * other
        if cache is None:
            return y
        if cache.layers:
            y = y + cache.layers[-1]
        cache.layers.append(y)
        cache.seen += 1
        return y, cache


def test_a_cache_object_is_filled_as_by_the_model() -> None:
    model = Cached()
    x = torch.randn(2, 4)
    exported = export(model, {"x": x, "cache": Cache()})
    traced = TracedModule(model, exported)
    mine, theirs = Cache(), Cache()
    result, returned = traced(x, cache=mine)
    expected, _ = model(x, cache=theirs)
    assert returned is mine
    assert mine.owner is mine
    assert mine.seen == 1
    assert mine.layers[0] is result
    torch.testing.assert_close(result, expected)

    exported = export(model, {"x": x, "cache": mine})
    assert [p.name for p in exported.placeholders if p.kind == "input"] == ["x", "cache.layers.0"]
    assert mine.seen == 1, "the trace leaves the example inputs alone"
    assert len(mine.layers) == 1
    result, returned = TracedModule(model, exported)(x, cache=mine)
    expected, _ = model(x, cache=theirs)
    assert returned is mine
    assert mine.seen == 2
    assert len(mine.layers) == 2
    torch.testing.assert_close(result, expected)


def test_arguments_of_all_kinds() -> None:
    model = Cached()
    a, b, c, d = (torch.randn(2, 4) for _ in range(4))
    exported = export(model, (a, b))
    assert [p.name for p in exported.placeholders if p.kind == "input"] == ["x", "rest.0"]
    torch.testing.assert_close(TracedModule(model, exported)(c, d), model(c, d))

    exported = export(model, {"x": a, "scale": 2.0, "gate": b, "extra": c})
    assert [p.name for p in exported.placeholders if p.kind == "input"] == ["x", "extra", "gate"]
    traced = TracedModule(model, exported)
    torch.testing.assert_close(traced(x=a, extra=c, gate=d, scale=2.0), model(x=a, gate=d, extra=c, scale=2.0))
    torch.testing.assert_close(traced(a, scale=2.0, gate=d, extra=c), model(a, scale=2.0, gate=d, extra=c))


def changed_input(net: Net, x: torch.Tensor) -> torch.Tensor:
    x[:, 0] += 1
    x.mul_(2)
    return net.first(x)


def test_an_input_changed_in_place_is_changed_for_the_caller() -> None:
    model = Net(changed_input)
    exported = export(model, (example(),))
    assert [(mutation.target, mutation.kind) for mutation in exported.mutations] == [("x", "input")]
    mine, theirs = example(), example()
    torch.testing.assert_close(TracedModule(model, exported)(mine), model(theirs))
    torch.testing.assert_close(mine, theirs)
    assert not torch.equal(mine, example())


def test_a_changed_input_that_needs_a_gradient() -> None:
    model = Net(changed_input)
    exported = export(model, (example(),))
    gradients = []
    for module in (TracedModule(model, exported), model):
        x = example().requires_grad_()
        inner = x * 1
        (module(inner).sum() + inner.square().sum()).backward()
        gradients.append(x.grad)
    torch.testing.assert_close(gradients[0], gradients[1])


def annotated(net: Net, x: torch.Tensor) -> torch.Tensor:
    x = named(x, "batch d_in")
    y = named(named(net.first(x), "batch d_model"), "batch width")
    return named(y * 2, "batch d_out")


def test_named_leaves_a_note_and_no_node() -> None:
    nodes = list(assert_equal(annotated).graph_module.graph.nodes)
    assert {node.name: node.meta["named"] for node in nodes if "named" in node.meta} == {
        "x": ["batch d_in"],
        "linear": ["batch d_model", "batch width"],
        "mul": ["batch d_out"],
    }


def test_named_is_free_outside_of_a_trace() -> None:
    x = example()
    assert named(x, "batch d_in") is x


def remembers(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.last = net.first(x)
    return net.last


def test_a_tensor_kept_on_the_model_is_a_warning() -> None:
    model = Net(remembers)
    with pytest.warns(AutoparWarning, match="the forward of Net sets self.last to a tensor; the traced graph does not"):
        export(model, (example(),))
    assert not hasattr(model, "last")


class Rounded(torch.autograd.Function):
    """A gradient as if nothing had been rounded, within bounds; a plain number beside the tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, steps: int) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.steps = steps
        return (x * steps).round() / steps

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < ctx.steps / 4), None


class Reversed(torch.autograd.Function):
    """Two results, an input without a gradient, and the newer way to write a function."""

    @staticmethod
    def forward(x: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x[rows], x.sum(-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, None]:
        x, rows = ctx.saved_tensors
        return torch.zeros_like(x).index_add(0, rows, -first) - second[:, None], None


def functions(net: Net, x: torch.Tensor) -> torch.Tensor:
    rounded = Rounded.apply(net.first(x), 3) + Rounded.apply(net.second(x), 5)
    rows, sums = Reversed.apply(rounded, torch.tensor([2, 0, 1]))
    return rows * sums[:, None]


def test_functions_with_a_backward_of_their_own_keep_it() -> None:
    assert_equal(functions)
    graph = autopar.trace(Net(functions), (example(),))
    found = {node.op.split(".")[1]: str(node.rule) for node in graph.nodes if node.source == "discovered"}
    assert found["Rounded_0"] == found["Rounded_1"] == "a b -> a b", "one for each number"


def test_a_registered_custom_op_keeps_its_backward() -> None:
    @torch.library.custom_op("autopar_tests::doubled", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    doubled.register_fake(torch.empty_like)
    doubled.register_autograd(lambda context, gradient: gradient * 5)
    exported = assert_equal(lambda net, x: doubled(net.first(x)))
    assert torch.ops.autopar_tests.doubled.default in ops(exported)


def test_nothing_of_torch_stays_changed() -> None:
    import torch.utils.checkpoint as checkpoint
    from torch.fx.proxy import TracerBase

    def now() -> list[Any]:
        return [
            torch.autograd.Function.apply,
            torch.autograd.grad,
            torch.autograd.backward,
            torch.Tensor.register_hook,
            torch.inference_mode.__enter__,
            checkpoint.CheckpointFunction,
            checkpoint._checkpoint_without_reentrant_generator,
            TracerBase.create_node,
        ]

    before = now()
    assert_equal(no_grad)
    assert now() == before
