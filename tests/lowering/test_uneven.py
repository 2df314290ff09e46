"""Ops on uneven shards, on simulated ranks: five positions over four ranks, the last of which has none of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.errors import LayoutError
from autopar.sharding.choices import can_split
from autopar.sharding.layout.language import choose_layout, parse_layout
from autopar.sharding.propagation import propagate
from autopar.tracing.trace import trace
from examples.gpt import gpt
from examples.moe import moe
from tests.ranks import difference, difference_of


class Op(nn.Module):
    """A function of `x`, to which a parameter is added, and of other parameters."""

    def __init__(self, function: Callable[..., Any], shape: Sequence[int], others: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.function = function
        self.offset = nn.Parameter(torch.randn(*shape))
        self.others = nn.ParameterList([nn.Parameter(torch.randn(*shape)) for shape in others])

    def forward(self, x: Tensor) -> Any:
        return self.function(x + self.offset, *self.others)


def traced(function: Callable[..., Any], shape: Sequence[int], dims: str, others: Sequence[Sequence[int]] = ()) -> Any:
    torch.manual_seed(1)
    model = Op(function, shape, others).double()
    x = torch.randn(*shape, dtype=torch.float64, requires_grad=True)
    return trace(model, (x,), dims={"x": dims}), x


LABELS = torch.tensor([4, 0, 2, -100, 1, 3])


def entropy(**options: Any) -> Callable[..., Tensor]:
    return lambda x: functional.cross_entropy(x, LABELS, **options)


def table(x: Tensor, weight: Tensor) -> Tensor:
    return functional.embedding(torch.arange(7).remainder(5), weight) * x


def norm_of_batches(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return functional.batch_norm(x, None, None, scale, shift, training=True)


def apart(x: Tensor) -> Tensor:
    return x.view(5, 2, 3).transpose(0, 1).reshape(2, 15).tanh().view(2, 5, 3).sum(0)


Case = tuple[Callable[..., Any], Sequence[int], str, Sequence[Sequence[int]]]

OPS: Mapping[str, Case] = {
    "pointwise": (lambda x: x.sigmoid() * 2, (5, 6), "n d", ()),
    "sum": (lambda x: x.sum(0), (5, 6), "n d", ()),
    "mean": (lambda x: x.mean(0), (5, 6), "n d", ()),
    "mean of all": (lambda x: x.square().mean(), (5, 6), "n d", ()),
    "error": (lambda x: functional.mse_loss(x, torch.ones_like(x)), (5, 6), "n d", ()),
    "variance": (lambda x: x.var(0), (5, 6), "n d", ()),
    "deviation and mean": (lambda x: torch.std_mean(x, 0), (5, 6), "n d", ()),
    "softmax": (lambda x: (9 * x).softmax(0), (5, 6), "n d", ()),
    "log softmax": (lambda x: (9 * x).log_softmax(0), (5, 6), "n d", ()),
    "layer norm": (lambda x, w, b: functional.layer_norm(x, (5,), w, b), (6, 5), "d n", ((5,), (5,))),
    "layer norm of rows": (lambda x, w: functional.layer_norm(x, (6,), w), (5, 6), "n d", ((6,),)),
    "rms norm": (lambda x, w: functional.rms_norm(x, (5,), w), (6, 5), "d n", ((5,),)),
    "batch norm": (norm_of_batches, (5, 3, 4), "n c d", ((3,), (3,))),
    "channels of batch norm": (norm_of_batches, (4, 5, 3), "d n c", ((5,), (5,))),
    "group norm": (lambda x: functional.group_norm(x, 3), (5, 6), "n d", ()),
    "classes": (entropy(), (6, 5), "d n", ()),
    "classes, smoothed": (entropy(label_smoothing=0.2, reduction="sum"), (6, 5), "d n", ()),
    "classes, each": (entropy(reduction="none"), (6, 5), "d n", ()),
    "linear, in": (functional.linear, (6, 5), "d n", ((4, 5), (4,))),
    "linear, out": (functional.linear, (6, 4), "d m", ((5, 4), (5,))),
    "linear, rows": (functional.linear, (5, 4), "n d", ((3, 4), (3,))),
    "product": (lambda x, w: x.transpose(1, 2) @ w, (2, 5, 3), "b n d", ((2, 5, 4),)),
    "einsum": (lambda x, w: torch.einsum("nd,nde->ne", x, w), (5, 3), "n d", ((5, 3, 2),)),
    "rows of a table": (table, (7, 3), "m d", ((5, 3),)),
    "view": (apart, (5, 6), "n d", ()),
    "expand": (lambda x, w: x.unsqueeze(1).expand(5, 3, 6) * w, (5, 6), "n d", ((3, 6),)),
    "halves": (lambda x: torch.cat([*x.chunk(2, 1)][::-1], 1), (4, 10), "d m", ()),
    "causal": (
        lambda x: functional.scaled_dot_product_attention(x, x + 1, x.sin(), is_causal=True),
        (2, 5, 4),
        "b n d",
        (),
    ),
    "triangle": (lambda x: x.tril() + x.triu(1) * 2, (5, 6), "n d", ()),
    "numbers": (lambda x: x * torch.arange(5).view(5, 1), (5, 6), "n d", ()),
    "convolution": (lambda x, w, b: functional.conv1d(x, w, b, padding=1), (2, 3, 5), "b c n", ((4, 3, 3), (4,))),
    "convolution, stride": (lambda x, w: functional.conv1d(x, w, stride=2), (2, 3, 11), "b c n", ((4, 3, 3),)),
    "convolution, channels": (
        lambda x, w, b: functional.conv1d(x, w, b, padding=1), (2, 5, 6), "b n s", ((4, 5, 3), (4,))
    ),
    "convolution, wide": (lambda x, w: functional.conv1d(x, w, padding=4), (2, 3, 5), "b c n", ((4, 3, 9),)),
    "largest of windows": (lambda x: functional.max_pool1d(x, 3, 2, 1), (2, 3, 9), "b c n", ()),
    "means of windows": (
        lambda x: functional.avg_pool1d(x, 3, 2, 1, count_include_pad=False), (2, 3, 9), "b c n", ()
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPS)
def test_uneven_and_empty_shards(name: str) -> None:
    function, shape, dims, others = OPS[name]
    graph, x = traced(function, shape, dims, others)
    split = next(dim for size in (5, 9, 11) for dim in graph.dims if size in graph.dims[dim].sizes)
    for axes in ({"a": 4}, {"a": 2, "b": 2}):
        place = "*".join(axes)
        text = f"{split} -> {place} pad; * -> none"
        assert difference(graph, text, axes, [x]) < 1e-12, (axes, text)


@pytest.mark.parametrize("name", ["linear, in", "convolution", "classes", "softmax", "mean", "layer norm"])
def test_the_op_itself_works_on_uneven_shards(name: str) -> None:
    """And is not run whole."""
    function, shape, dims, others = OPS[name]
    graph, _ = traced(function, shape, dims, others)
    (split,) = (dim for dim in graph.dims if 5 in graph.dims[dim].sizes)
    assignment = propagate(graph, parse_layout(f"{split} -> a pad; * -> none"), {"a": 2})
    assert all(
        assignment.ops[node.name].choice.axes == ("a",)
        for node in graph.nodes
        if any(5 in graph.tensors[tensor].shape for tensor in node.operands if tensor)
    )


def test_two_dims_at_once() -> None:
    graph, x = traced(lambda x, w, b: functional.linear(x, w, b).relu().mean(), (5, 7), "n d", ((3, 7), (3,)))
    dims = {size: dim for dim in graph.dims for size in graph.dims[dim].sizes}
    text = f"{dims[5]} -> a pad; {dims[7]} -> b pad; {dims[3]} -> c pad; * -> none"
    for axes in ({"a": 2, "b": 2, "c": 2}, {"a": 4, "b": 2, "c": 1}, {"a": 1, "b": 4, "c": 2}):
        assert difference(graph, text, axes, [x]) < 1e-12


def test_without_pad_a_size_that_does_not_divide_is_refused() -> None:
    graph, _ = traced(lambda x: x.tanh(), (5, 6), "n d")
    with pytest.raises(LayoutError) as error:
        propagate(graph, parse_layout("n -> a; * -> none", "my.lay"), {"a": 2})
    assert str(error.value) == (
        "E4: the dim 'n' of offset can take no alternative of its rule: a = 2 does not divide 5\n"
        "  my.lay:1 | n -> a; * -> none\n"
        "           | ^\n"
        "fix: add one, as in 'tp | none', allow uneven shards with 'pad', or choose a mesh that divides it"
    )


def test_an_op_is_cut_unevenly_only_where_the_layout_allows_it() -> None:
    graph, x = traced(lambda x, w: functional.linear(x, w).relu(), (4, 6), "n d", ((5, 6),))
    found = propagate(graph, parse_layout("d -> a; * -> none; op @/linear[k -> a]"), {"a": 2})
    assert str(found.ops["/linear"].choice) == "k -> a"
    with pytest.raises(LayoutError, match=r"E5: the op /linear .* cannot be split as it is pinned"):
        propagate(graph, parse_layout("* -> none; op @/linear[n -> a]"), {"a": 2})
    dim = next(dim for dim in graph.dims if graph.dims[dim].size == 5)
    text = f"{dim} -> a pad; * -> none; op @/linear[n -> a]"
    assert difference(graph, text, {"a": 2}, [x]) < 1e-12


def test_an_op_whose_rule_was_tried_on_even_shards_is_not_cut_unevenly() -> None:
    graph, _ = traced(lambda x: x.tanh(), (5, 6), "n d")
    node = next(node for node in graph.nodes if "tanh" in node.op)
    rows, columns = ((node.rule.factors[i], 0) for i in (0, 1))
    for source, allowed in (("table", True), ("discovered", False)):
        found = replace(node, source=source)
        assert can_split(found, rows, ("a",), {"a": 2}, uneven=True) is allowed
        assert can_split(found, columns, ("a",), {"a": 2}), "even"
        assert not can_split(found, rows, ("a",), {"a": 2})


STRATEGIES = {
    "ddp": {"dp": 2}, "zero1": {"dp": 2}, "fsdp": {"fsdp": 2}, "megatron": {"dp": 2, "tp": 2},
    "fsdp_tp": {"fsdp": 2, "tp": 2}, "megatron_sp": {"dp": 2, "tp": 2}, "gshard_moe": {"dp": 2, "ep": 2},
}  # fmt: skip
QUICK = ("ddp", "megatron")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in STRATEGIES]
)
def test_the_last_batch_of_a_loader_under_shipped_strategies(name: str) -> None:
    """Three rows over two ranks, and one; heads that `tp` does not divide stay whole."""
    torch.manual_seed(0)
    axes = STRATEGIES[name]
    heads = 2 if name == "gshard_moe" else 3
    for batch in (3, 1):
        made = moe if name == "gshard_moe" else gpt
        model, inputs = made(layers=1, d_model=24, heads=heads, vocab=16, seq=6, batch=batch)
        graph = trace(model.double(), inputs)
        assignment = propagate(graph, choose_layout(name, axes), axes)
        assert difference_of(graph, assignment, inputs) < 1e-9
