"""Price and memory of a loss in pieces, against what is counted while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import autopar
from autopar.cost.compute.logit_bytes import BACKWARD_KERNELS, FORWARD_KERNELS, logit_bytes
from autopar.cost.compute.op_time import OpWork, op_work
from autopar.ir.graph import NamedGraph
from autopar.ir.values import NamedNode
from autopar.plans.loss_pieces import stated_graph
from autopar.rules.ops.loss_pieces import LINEAR_CROSS_ENTROPY
from autopar.sharding.layout.language import parse_layout
from autopar.sharding.propagation import propagate
from benchmarks.memory import measure
from examples.gpt import gpt
from tests.cost.test_op_time import ROOFLINE
from tests.cost.test_peak import plan_of, predicted

ROWS, WIDTH, CLASSES = 96, 16, 128


class Head(nn.Module):
    """The last layer, ops on the logits, and the loss."""

    def __init__(self, bias: bool = False, scale: float = 1.0, softcap: float = 0.0, smoothing: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.layer = nn.Linear(WIDTH, CLASSES, bias)
        self.scale, self.softcap, self.smoothing = scale, softcap, smoothing

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        logits = self.layer(self.norm(x))
        logits = logits if self.scale == 1 else logits * self.scale
        logits = torch.tanh(logits / self.softcap) * self.softcap if self.softcap else logits
        return functional.cross_entropy(logits.float(), target, label_smoothing=self.smoothing, reduction="sum")


def head(pieces: int, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[NamedGraph, NamedNode]:
    inputs = torch.randn(ROWS, WIDTH, dtype=dtype), torch.randint(CLASSES, (ROWS,))
    graph = autopar.trace(Head(**options).to(dtype), inputs)
    graph = stated_graph(graph, parse_layout(f"pieces {pieces}"), "sharded")
    (node,) = (node for node in graph.nodes if node.op == str(LINEAR_CROSS_ENTROPY))
    return graph, node


def work_of(graph: NamedGraph, node: NamedNode, layout: str, axes: Mapping[str, int]) -> OpWork:
    choice = propagate(graph, parse_layout(layout), axes).ops[node.name]
    return op_work(graph, node, choice, graph.footprints[node.node], axes, ROOFLINE)


def run(graph: NamedGraph, node: NamedNode) -> tuple[Tensor, list[Tensor]]:
    """Return the loss of the node on drawn operands, and the operands."""
    (source,) = graph.exported.graph_module.graph.find_nodes(op="call_function", target=LINEAR_CROSS_ENTROPY)
    tensors = [graph.tensors[name] for name in node.operands if name is not None]
    drawn = [torch.randn(one.shape, dtype=one.dtype).requires_grad_() for one in tensors[:-1]]
    bias = drawn[2] if len(drawn) > 2 else None
    target = torch.randint(CLASSES, (ROWS,))
    return LINEAR_CROSS_ENTROPY(drawn[0], drawn[1], bias, target, **source.kwargs), drawn


@pytest.mark.parametrize("pieces", [1, 4, 7])
def test_flops(pieces: int) -> None:
    graph, node = head(pieces)
    work = work_of(graph, node, "* -> none", {"a": 2})
    with FlopCounterMode(display=False) as forward:
        loss, _ = run(graph, node)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    product = 2 * ROWS * WIDTH * CLASSES
    assert work.forward.flops == pytest.approx(forward.get_total_flops())
    # The logits again, and a gradient of the rows and of the weight.
    assert work.backward.flops == pytest.approx(backward.get_total_flops())
    assert (forward.get_total_flops(), backward.get_total_flops()) == (product, 3 * product)


@pytest.mark.parametrize("layout", ["batch -> a; * -> none", "vocab -> a; * -> none"])
def test_axes_divide_the_work(layout: str) -> None:
    model, inputs = gpt(layers=1, d_model=64, heads=4, vocab=256, seq=32, batch=4)
    graph = stated_graph(autopar.trace(model, inputs), parse_layout("pieces 4"), "sharded")
    (node,) = (node for node in graph.nodes if node.op == str(LINEAR_CROSS_ENTROPY))
    whole, half = (work_of(graph, node, text, {"a": 2}) for text in ("* -> none", layout))
    assert half.forward.flops == whole.forward.flops / 2
    assert half.backward.flops == whole.backward.flops / 2
    assert half.backward.seconds < 0.6 * whole.backward.seconds


class Bytes(TorchDispatchMode):
    """Counts the bytes that ops on tensors of one size read and write, products apart, and all kernels."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.bytes, self.kernels = size, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if func.is_view or name in ("mm", "addmm", "detach", "lift_fresh") or not made:
            return result
        self.kernels += 1
        if name in ("gather", "scatter_add_", "empty_like", "new_empty"):
            return result  # a number of each row
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.bytes += sum(one.numel() * one.element_size() for one in (*read, *made) if one.numel() == self.size)
        return result


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "scale": {"scale": 0.5},
    "cap": {"softcap": 2.0},
    "smoothing": {"smoothing": 0.1},
    "all": {"bias": True, "scale": 0.5, "softcap": 2.0, "smoothing": 0.1},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_bytes_of_logits(options: Mapping[str, Any], dtype: torch.dtype) -> None:
    graph, node = head(1, dtype, **options)
    moved = logit_bytes(graph, node)
    logits = ROWS * CLASSES
    with Bytes(logits) as forward:
        loss, _ = run(graph, node)
    with Bytes(logits) as backward:
        loss.backward()
    # A CPU casts in a kernel of its own, and reads the result again.
    cast = 8 if dtype is torch.bfloat16 else 0
    assert (moved.forward + cast) * logits == forward.bytes
    assert (moved.backward + cast) * logits == backward.bytes


def test_kernels_and_the_weight() -> None:
    """Each piece more has so many kernels, and adds to the gradient of the weight once."""
    counts = []
    for pieces in (2, 4):
        graph, node = head(pieces, torch.bfloat16)
        with Bytes(WIDTH * CLASSES) as forward:
            loss, _ = run(graph, node)
        with Bytes(WIDTH * CLASSES) as backward:
            loss.backward()
        counts.append((forward.kernels, backward.kernels, backward.bytes))
    apart = [(after - before) / 2 for before, after in zip(*counts, strict=True)]
    assert apart[0] == pytest.approx(FORWARD_KERNELS, rel=0.2)
    assert apart[1] == pytest.approx(BACKWARD_KERNELS, rel=0.2)
    # Rows and weights have other sizes than logits here; the product is read, the total read and written.
    assert apart[2] == logit_bytes(graph, node).of_weight * WIDTH * CLASSES


LAYOUTS: Mapping[str, tuple[str, Mapping[str, int]]] = {
    "ddp": ("ddp", {"dp": 4}),
    "fsdp": ("fsdp", {"fsdp": 4}),
    "split classes": ("batch -> dp; (heads, d_ff, vocab) -> tp; * -> none", {"dp": 2, "tp": 2}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("layout", "axes"), LAYOUTS.values(), ids=LAYOUTS)
def test_memory_is_measured_as_predicted(layout: str, axes: Mapping[str, int]) -> None:
    """Logits are most of the memory of this model, and a sixteenth of them is not."""
    whole = autopar.trace(*gpt(layers=1, d_model=32, heads=4, vocab=2048, seq=64, batch=16))
    pieced = stated_graph(whole, parse_layout("pieces 16"), "sharded")
    peaks = []
    for graph in (whole, pieced):
        plan = plan_of(graph, layout, axes)
        found, real = predicted(graph, plan), measure(graph, plan, rank=1)
        assert found.peak_bytes == pytest.approx(real.peak_bytes, rel=0.05)
        assert found.saved_bytes == pytest.approx(real.saved_bytes, rel=0.05)
        peaks.append(real.peak_bytes)
    assert peaks[1] < 0.5 * peaks[0]
