"""What ops compute, from their rules and local shapes: FLOPs against torch's own count, and how splits divide them."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import autopar
from autopar.cost.compute.op_time import OpWork, cast_work, op_work
from autopar.cost.compute.rates import peak_of, rate_notes, rate_of
from autopar.cost.hardware.cluster import Device, load_device
from autopar.errors import ClusterError
from autopar.ir.analysis.float8_products import in_float8
from autopar.ir.graph import NamedGraph
from autopar.ir.precision import PRESETS
from autopar.sharding.layout.language import parse_layout
from autopar.sharding.propagation import propagate
from autopar.sharding.sharding import ROUTING_IMBALANCE

ROOFLINE = Device("roofline", 1e9, 1e12, 0.0, MappingProxyType({"float32": 1e12}))


def works(
    graph: NamedGraph, layout: str, axes: dict[str, int], device: Device = ROOFLINE, precision: str = "own"
) -> dict[str, OpWork]:
    assignment = propagate(graph, parse_layout(layout), axes)
    found = {}
    for node in graph.nodes:
        assigned, footprint = assignment.ops[node.name], graph.footprints[node.node]
        casts = (0, 1) if in_float8(node, graph.tensors, PRESETS[precision]) else ()
        found[node.name] = op_work(graph, node, assigned, footprint, axes, device, casts)
    return found


class Layer(nn.Module):
    """One op that multiplies."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(12, 24)
        self.conv = nn.Conv2d(6, 12, 3, stride=2, padding=1)
        self.grouped = nn.Conv2d(6, 12, 3, padding=1, groups=2)
        self.deconv = nn.ConvTranspose2d(6, 8, 4, stride=2, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        match self.kind:
            case "linear":
                return self.linear(x)
            case "conv":
                return self.conv(x)
            case "grouped":
                return self.grouped(x)
            case "deconv":
                return self.deconv(x)
            case "bmm":
                return torch.bmm(x, x.transpose(1, 2))
            case "einsum":
                return torch.einsum("bij,bjk->bik", x, x.transpose(1, 2))
        return functional.scaled_dot_product_attention(x, x, x)


SHAPES = {
    "linear": (4, 6, 12),
    "conv": (4, 6, 16, 8),
    "grouped": (4, 6, 16, 8),
    "deconv": (4, 6, 8, 8),
    "bmm": (4, 6, 8),
    "einsum": (4, 6, 8),
    "attention": (4, 2, 16, 8),
}


def counted(call: Any, x: torch.Tensor) -> tuple[int, int]:
    """The FLOPs of the forward and of the backward, as torch counts them; where it does not, as they are."""
    if call.kind == "attention":
        return 4 * x.numel() * x.shape[-2], 10 * x.numel() * x.shape[-2]
    with FlopCounterMode(display=False) as forward:
        result = call(x)
    with FlopCounterMode(display=False) as backward:
        result.sum().backward()
    if call.kind == "grouped":  # torch takes the weight's gradient for that of all channels by all
        return forward.get_total_flops(), 2 * forward.get_total_flops()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("kind", SHAPES)
def test_flops_are_those_that_torch_counts(kind: str) -> None:
    model = Layer(kind)
    x = torch.randn(SHAPES[kind], requires_grad=True)
    graph = autopar.trace(model, (x,))
    found = works(graph, "* -> none", {"a": 2}).values()
    forward, backward = sum(one.forward.flops for one in found), sum(one.backward.flops for one in found)
    expected = counted(model, x)
    assert forward == expected[0] > 0
    assert backward == pytest.approx(expected[1], rel=0.01)


@pytest.mark.parametrize("kind", [kind for kind in SHAPES if kind != "einsum"])
def test_a_split_batch_halves_the_work(kind: str) -> None:
    graph = autopar.trace(
        Layer(kind), (torch.randn(SHAPES[kind]),), dims={"x": " ".join(["batch", "e", "f", "g"][: len(SHAPES[kind])])}
    )
    whole = works(graph, "* -> none", {"a": 2})
    half = works(graph, "batch -> a; * -> none", {"a": 2})
    for name, work in whole.items():
        assert half[name].forward.flops == work.forward.flops / 2
        assert half[name].forward.bytes <= work.forward.bytes


def test_a_gradient_that_nobody_wants_is_not_computed() -> None:
    model = Layer("linear")
    wanted = works(autopar.trace(model, (torch.randn(4, 6, 12, requires_grad=True),)), "* -> none", {"a": 2})
    unwanted = works(autopar.trace(model, (torch.randn(4, 6, 12),)), "* -> none", {"a": 2})
    (both,), (one,) = wanted.values(), unwanted.values()
    assert both.forward == one.forward
    assert both.backward.flops == 2 * one.backward.flops


def attention(is_causal: bool) -> dict[str, OpWork]:
    class Attend(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.scaled_dot_product_attention(x, x, x, is_causal=is_causal)

    x = torch.randn(2, 2, 64, 8, requires_grad=True)
    return works(autopar.trace(Attend(), (x,), dims={"x": "batch heads seq e"}), "* -> none", {"a": 2})


def test_causal_attention_computes_half_of_the_scores() -> None:
    (full,), (causal,) = attention(False).values(), attention(True).values()
    assert causal.forward.flops / full.forward.flops == pytest.approx(65 / 128)


class Dropped(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)


def test_several_ranks_write_dropout_of_attention_out() -> None:
    """In float32, all scores, with passes over them; one rank runs the fused kernel."""
    given = [torch.randn(4, 8, 512, 64, dtype=torch.bfloat16, device="meta", requires_grad=True) for _ in range(3)]
    graph = autopar.trace(Dropped(), tuple(given), dims=dict.fromkeys("qkv", "batch heads rows k"))
    device = Device("halves", 1e12, 1e12, 0.0, MappingProxyType({"float32": 1e13, "bfloat16": 1e14}))
    ((alone,), (many,)) = (works(graph, "batch -> dp; * -> none", {"dp": ranks}, device).values() for ranks in (1, 2))
    products = 2 * 2.0 * 4 * 8 * 512 * 512 * 64
    assert alone.forward.flops == pytest.approx(products / 2, rel=1e-2)
    assert many.forward.flops == products / 2, "all scores of half of the batch"
    assert many.backward.flops == products
    assert many.forward.multiplying_seconds == pytest.approx(10 * alone.forward.multiplying_seconds, rel=1e-2)
    scores = 2 * 8 * 512 * 512 * 4
    assert 10 * scores < many.forward.bytes < 15 * scores
    assert many.forward.seconds > many.forward.multiplying_seconds + 10 * scores / 1e12


def test_the_last_shard_of_causal_queries_sees_most() -> None:
    class Attend(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return functional.scaled_dot_product_attention(q, k, k, is_causal=True)

    graph = autopar.trace(
        Attend(),
        (torch.randn(2, 2, 64, 8), torch.randn(2, 2, 64, 8)),
        dims={"q": "batch heads seq e", "k": "batch heads keys e"},
    )
    (whole,) = works(graph, "* -> none", {"a": 2}).values()
    (half,) = works(graph, "seq -> a; * -> none", {"a": 2}).values()
    assert whole.forward.flops / 2 < half.forward.flops < whole.forward.flops


@pytest.mark.parametrize(
    ("rows", "keys", "shards"), [(64, 64, 2), (64, 64, 4), (64, 40, 4), (40, 64, 4), (9, 9, 4), (10, 10, 4), (8, 1, 2)]
)
def test_causal_queries_are_priced_by_the_pairs_of_the_busiest_shard(rows: int, keys: int, shards: int) -> None:
    class Attend(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return functional.scaled_dot_product_attention(q, k, k, is_causal=True)

    inputs = torch.randn(2, 3, rows, 8), torch.randn(2, 3, keys, 8)
    graph = autopar.trace(Attend(), inputs, dims={"q": "batch heads seq e", "k": "batch heads keys e"})
    (found,) = works(graph, "seq -> a pad; * -> none", {"a": shards}).values()
    mask = torch.ones(rows, keys, dtype=torch.bool).tril()
    busiest = max(int(part.sum()) for part in mask.split(-(-rows // shards)))
    assert found.forward.flops == pytest.approx(2 * 3 * busiest * 2 * 2 * 8)


@pytest.mark.parametrize(
    ("head_dim", "is_causal", "forward", "backward"),
    [
        # 8,192 tokens, TFLOP/s: ai-dynamo/aiconfigurator@095f58a51, h100_sxm, SGLang 0.5.14; 1.7 times the backward
        # of FlashAttention-2 (Dao-AILab/flash-attention, pull request 1791); cuDNN's backward without a mask (Shah et
        # al., FlashAttention-3, figure 6)
        (128, True, 563, 1.7 * 287),
        (64, True, 456, 432),
    ],
)
def test_measured_attention(head_dim: int, is_causal: bool, forward: float, backward: float) -> None:
    class Attend(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.scaled_dot_product_attention(x, x, x, is_causal=is_causal)

    x = torch.empty(2, 16, 8192, head_dim, dtype=torch.bfloat16, device="meta", requires_grad=True)
    graph = autopar.trace(Attend(), (x,), dims={"x": "batch heads seq e"})
    fresh = replace(load_device("h100"), sustained_fraction=1.0)
    (work,) = works(graph, "* -> none", {"a": 2}, fresh).values()
    assert work.forward.flops / work.forward.seconds / 1e12 == pytest.approx(forward, rel=0.05)
    assert work.backward.flops / work.backward.seconds / 1e12 == pytest.approx(backward, rel=0.05)


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        y = x.transpose(1, 2).unsqueeze(1)
        return (torch.relu(y) + y).sum()


def test_views_are_free_and_lookups_read_what_they_give() -> None:
    graph = autopar.trace(Views(), (torch.randint(1000, (4, 6)),))
    found = works(graph, "* -> none", {"a": 2})
    kinds = {node.op.split(".")[1]: found[node.name] for node in graph.nodes}
    size = 4 * 6 * 16 * 4
    assert kinds["transpose"].forward.seconds == kinds["unsqueeze"].forward.seconds == 0
    assert kinds["transpose"].backward.seconds == 0
    assert kinds["embedding"].forward.bytes == 2 * size + 4 * 6 * 8
    assert kinds["embedding"].backward.bytes >= 1000 * 16 * 4, "the gradient of the table is written whole"
    assert kinds["add"].forward.bytes == 3 * size
    assert kinds["add"].backward.bytes == 0, "it passes the gradient on"
    assert kinds["relu"].backward.bytes == 3 * size, "the gradient, the result that is kept, and what is made of them"


HALF_KNOWN = Device("half known", 1e9, 1e12, 0.0, MappingProxyType({"float32": 8e12, "float16": 64e12}))


@pytest.mark.parametrize(
    ("dtype", "rate", "source"),
    [
        (torch.float64, 4e12, "float32"),  # half for twice the width
        (torch.float32, 8e12, "float32"),
        (torch.bfloat16, 64e12, "float16"),
        (torch.float8_e4m3fn, 64e12, "float16"),  # no slower
        (torch.int8, 8e12, "float32"),
        (torch.int64, 8e12, "float32"),
        (torch.bool, 8e12, "float32"),
        (torch.complex64, 2e12, "float32"),
        (torch.complex128, 1e12, "float32"),
    ],
)
def test_a_dtype_without_a_rate_has_that_of_the_nearest(dtype: torch.dtype, rate: float, source: str) -> None:
    found = rate_of(HALF_KNOWN, dtype)
    assert (found.flops_per_second, found.taken_from) == (rate, source)
    assert rate_of(replace(HALF_KNOWN, peak_flops={"float8": 9.0}), torch.float8_e5m2).is_known


def test_a_rate_that_is_not_the_device_s_own_is_said() -> None:
    graph = autopar.trace(Layer("linear").double(), (torch.randn(4, 6, 12, dtype=torch.float64),))
    assert rate_notes(graph, HALF_KNOWN) == ("float64 at 4 TFLOP/s, from the rate of float32",)
    assert rate_notes(graph, load_device("h100")) == ()
    assert works(graph, "* -> none", {"a": 2}, HALF_KNOWN)
    plan = autopar.plan(Layer("linear").double(), "dp=2", (torch.randn(4, 6, 12, dtype=torch.float64),), cluster="h100")
    assert "no rate" not in plan.summary()
    poor = replace(plan.cluster, device=replace(plan.cluster.device, peak_flops={"float32": 8e12}))
    assert "priced float64 at 4 TFLOP/s, from the rate of float32" in replace(plan, cluster=poor).summary()


def test_a_device_without_any_rate_is_an_error() -> None:
    with pytest.raises(ClusterError) as error:
        peak_of(replace(HALF_KNOWN, peak_flops={"tf32": 1e12}), torch.float64)
    assert str(error.value) == (
        "device 'half known' has no rate for float64, which the model computes in, and none of a float\n"
        "fix: add float64 or float32 under [peak] of the device; it has tf32"
    )


@pytest.mark.parametrize("name", ["v100", "a100-40", "a100-80", "h100", "h200", "b200", "gb200"])
def test_every_device_has_a_rate_for_doubles(name: str) -> None:
    device = load_device(name)
    assert 0.4 < device.peak_flops["float64"] / device.peak_flops["float32"] <= 1


def test_complex_numbers_are_multiplied_as_four_real_ones() -> None:
    device = load_device("h100")
    assert peak_of(device, torch.complex64) == peak_of(device, torch.float32) / 4


def test_the_launch_is_the_least() -> None:
    device = replace(load_device("h100"), launch_seconds=1.0)
    for work in works(autopar.trace(Layer("linear"), (torch.randn(4, 6, 12),)), "* -> none", {"a": 2}, device).values():
        assert work.forward.seconds == 1.0


class Experts(nn.Module):
    """Rows that each meet the matrix of one expert."""

    def __init__(self, experts: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, 16, columns))

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        pytest.importorskip("transformers.integrations.moe")
        product = "transformers.grouped_mm_fallback.default"
        rows: torch.Tensor = torch.ops.autopar.expert_rows(x, self.weight, chosen, product)
        return rows


def of_experts(experts: int, layout: str, columns: int = 24, precision: str = "own") -> OpWork:
    inputs = (torch.randn(64, 16, requires_grad=True), torch.randint(experts, (64,)))
    dims = {"x": "batch d_model", "chosen": "batch", "weight": "experts d_model d_ff"}
    graph = autopar.trace(Experts(experts, columns), inputs, dims=dims, precision=precision)
    (name,) = [node.name for node in graph.nodes if node.op == "autopar.grouped.default"]
    device = replace(ROOFLINE, peak_flops=MappingProxyType({"float32": 1e12, "bfloat16": 2e12, "float8": 4e12}))
    return works(graph, layout, {"a": 4}, device, precision)[name]


@pytest.mark.parametrize("experts", [4, 8, 32])
def test_a_row_meets_one_expert_however_many_there_are(experts: int) -> None:
    work = of_experts(experts, "* -> none")
    assert work.forward.flops == 2 * 64 * 16 * 24
    assert work.backward.flops == 2 * work.forward.flops
    assert work.forward.bytes == 4 * (64 * 16 + experts * 16 * 24 + 64 * 24), "the matrices are all read"


def test_ranks_that_hold_other_experts_multiply_their_own_rows() -> None:
    whole, rows, experts = (
        of_experts(8, layout) for layout in ("* -> none", "batch -> a; * -> none", "experts -> a; * -> none")
    )
    assert rows.forward.flops == whole.forward.flops / 4
    assert experts.forward.flops == pytest.approx(ROUTING_IMBALANCE * whole.forward.flops / 4), "of the busiest rank"
    assert experts.forward.bytes < rows.forward.bytes, "each reads its own matrices"


def test_experts_in_float8_multiply_at_its_rate_and_cast_both_operands() -> None:
    plain, cast = (of_experts(8, "* -> none", 32, precision) for precision in ("bf16", "fp8"))
    assert cast.forward.flops == plain.forward.flops == 2 * 64 * 16 * 32
    assert cast.forward.multiplying_seconds == plain.forward.multiplying_seconds / 2
    assert cast.backward.multiplying_seconds == plain.backward.multiplying_seconds / 2
    read, written = 64 * 16 + 8 * 16 * 32, 64 * 32
    each = cast_work(1.0, ROOFLINE).bytes
    assert plain.forward.bytes == 2 * (read + written)
    assert cast.forward.bytes == read + written + each * read, "the product moves one byte a number"
    odd = of_experts(8, "* -> none", 24, "fp8")
    assert odd.forward.multiplying_seconds == of_experts(8, "* -> none", 24, "bf16").forward.multiplying_seconds


class Positions(nn.Module):
    """A model in bfloat16 with angles of positions in float64, as FLUX has them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        steps = 1.0 / 10000.0 ** torch.linspace(0, 1, 8, dtype=torch.float64)
        angles = torch.einsum("bs,d->bsd", positions.double(), steps) @ torch.eye(8, dtype=torch.float64)
        turned = torch.cat([angles.cos(), angles.sin()], -1).to(x.dtype)
        return torch.as_tensor(self.linear(x) * turned)


@pytest.mark.parametrize("cluster", ["h100", "a100-80", "v100", "b200"])
def test_a_model_with_a_table_of_doubles_is_planned_on_gpus(cluster: str) -> None:
    inputs = (torch.randn(4, 6, 16, dtype=torch.bfloat16), torch.arange(6).expand(4, 6))
    plan = autopar.plan(Positions(), "dp=2", inputs, cluster=cluster, dims={"x": "batch seq d_model"})
    assert plan.step_seconds > 0
    assert ("from the rate of float16" in plan.summary()) is (cluster == "v100")
