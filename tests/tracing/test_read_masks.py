"""Masks and repeated heads of fused attention: what the graph says of them, and that it computes the same."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.ir.interpreter import TracedModule
from autopar.ir.values import Band
from autopar.tracing.export.export import export
from autopar.tracing.passes.edit import arguments_of
from autopar.tracing.passes.read_masks import ATTENTION_NOTE
from examples.hf import hf
from tests.equivalence import assert_equivalent

SDPA = torch.ops.aten.scaled_dot_product_attention.default
Call = tuple[str, bool, bool, bool, int]
Mask = Callable[[Any, Tensor], Any]


def calls(model: nn.Module, inputs: Any) -> list[Call]:
    """Of each fused attention: its note, whether a mask, is_causal and enable_gqa are given, and the heads of K."""
    found = []
    for node in export(model, inputs).graph_module.graph.find_nodes(op="call_function", target=SDPA):
        given = arguments_of(node)
        shapes = [given[name].meta["val"].shape[1] for name in ("key", "value")]
        assert shapes[0] == shapes[1]
        masked = given["attn_mask"] is not None
        note = str(node.meta[ATTENTION_NOTE])
        found.append((note, masked, given["is_causal"], given["enable_gqa"], shapes[0]))
    return found


def causal(kv: int, gqa: bool) -> Call:
    return "causal", False, True, gqa, kv


NO_MASK = ("no mask", False, False, False, 4)
BIAS = "mask kept: depends on {}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[Call, int]]] = {
    "llama": ("llama", {}, {causal(2, True): 2}),
    "mistral": ("mistral", {}, {("window 5", True, False, True, 2): 2}),
    "mistral, a longer window": ("mistral", {"sliding_window": 4096}, {causal(2, True): 2}),
    "gemma 2": ("gemma2", {}, {}),  # its cap on scores is no fused attention
    "gemma 3": ("gemma3_text", {}, {("window 5", True, False, True, 2): 1, causal(2, True): 1}),
    "qwen 3": ("qwen3", {}, {causal(2, True): 2}),
    "qwen 2": ("qwen2", {"num_key_value_heads": 2}, {causal(2, True): 2}),
    "gpt 2": ("gpt2", {}, {causal(4, False): 2}),
    "opt": ("opt", {}, {causal(4, False): 2}),
    "phi": ("phi", {}, {causal(4, False): 2}),
    "granite": ("granite", {"num_key_value_heads": 2}, {causal(2, True): 2}),
    "olmo 2": ("olmo2", {"num_key_value_heads": 1}, {causal(1, True): 2}),
    "smollm 3": ("smollm3", {}, {causal(2, True): 2}),
    "starcoder 2": ("starcoder2", {"bos_token_id": 0, "eos_token_id": 0}, {causal(2, True): 2}),
    "one head of keys": ("gpt_bigcode", {}, {causal(1, True): 2}),
    "falcon": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}, {causal(4, False): 2}),
    "bert": ("bert", {}, {NO_MASK: 2}),
    "modernbert": (
        "modernbert",
        {},
        {NO_MASK: 1, ("window of 2 before and 2 after", True, False, False, 4): 1},
    ),
    "bart": ("bart", {}, {NO_MASK: 4, causal(4, False): 2}),
    "t5": (
        "t5",
        {},
        {
            (BIAS.format("encoder"), True, False, False, 4): 2,
            (BIAS.format("decoder"), True, False, False, 4): 2,
            NO_MASK: 2,
        },
    ),
    "whisper": ("whisper", {}, {NO_MASK: 4, causal(4, False): 2}),
}


# One of each kind of mask and heads; the others are long.
QUICK = ("llama", "gpt 2", "mistral", "gemma 3", "one head of keys", "bert", "t5")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_attention_of_hugging_face_models(name: str) -> None:
    architecture, overrides, expected = FAMILIES[name]
    torch.manual_seed(0)
    model, inputs = hf(architecture, **overrides)
    assert Counter(calls(model, inputs)) == expected
    assert_equivalent(model, inputs)


def test_experts_of_mixtral() -> None:
    torch.manual_seed(0)
    model, inputs = hf("mixtral")
    assert Counter(calls(model, inputs)) == {causal(2, True): 2}
    assert_equivalent(model, inputs, dtype=torch.float32)  # its grouped matrix product knows no float64


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt2"])
def test_in_training_dropout_draws_what_the_model_draws(architecture: str) -> None:
    torch.manual_seed(0)
    model, inputs = hf(architecture, train=True, dropout=0.1)
    assert_equivalent(model, inputs)


# -- what is given with each call ------------------------------------------------------------------------------------


def logits_of(module: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    module.zero_grad()
    logits: Tensor = module(**inputs).logits
    logits.square().sum().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def assert_same_as_eager(model: nn.Module, traced: nn.Module, inputs: dict[str, Tensor]) -> None:
    expected, gradients = logits_of(model, inputs)
    found, ours = logits_of(traced, inputs)
    assert torch.allclose(found, expected, rtol=0, atol=1e-12 * float(expected.abs().max()))
    for name, gradient in gradients.items():
        assert torch.allclose(ours[name], gradient, rtol=1e-9, atol=1e-12 * float(gradient.abs().max() + 1)), name


PLAIN = torch.arange(10).expand(3, 10)
PACKED = torch.tensor([0, 1, 2, 3, 0, 1, 2, 0, 1, 2]).expand(3, 10)
# Positions that begin elsewhere, go back, and stay.
OTHER = torch.tensor([[3, 4, 5, 9, 10, 11, 2, 3, 3, 3], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0], [0, 0, 0, 1, 2, 0, 1, 2, 5, 6]])
PADDED = (torch.arange(10) < torch.tensor([[10], [7], [4]])).long()


@pytest.mark.parametrize("architecture", ["llama", pytest.param("mistral", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "traced_with", "called_with"),
    [
        ("position_ids", PLAIN, PACKED),
        pytest.param("position_ids", PACKED, PLAIN, marks=pytest.mark.slow),
        ("position_ids", PACKED, PACKED),
        ("position_ids", PACKED, OTHER),
        ("attention_mask", torch.ones(3, 10, dtype=torch.int64), PADDED),
        pytest.param("attention_mask", PADDED, PADDED, marks=pytest.mark.slow),
    ],
)
def test_a_mask_that_depends_on_an_input(
    architecture: str, name: str, traced_with: Tensor, called_with: Tensor
) -> None:
    torch.manual_seed(0)
    model, inputs = hf(architecture)
    model.double()
    given = {**inputs, name: traced_with.clone()}
    kept = {(f"mask kept: depends on {name}", True, False, True, 2): 2}
    assert Counter(calls(model, given)) == (kept if name == "attention_mask" else {})
    if name == "position_ids":
        notes = {node.attention.mask for node in autopar.trace(model, given).nodes if node.attention is not None}
        assert notes == {"documents" if architecture == "llama" else "documents, window 5"}
    traced = TracedModule(model, export(model, given))
    for value in (called_with, traced_with):
        assert_same_as_eager(model, traced, {**inputs, name: value.clone()})


# -- masks written by hand --------------------------------------------------------------------------------------------

B, H, T, E = 2, 4, 6, 8


class Attention(nn.Module):
    """Attention with masks that functions make, one result for each; `rows` queries on T keys."""

    def __init__(self, *masks: Mask, rows: int = T) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(B, H, rows, E))
        self.key = nn.Parameter(torch.randn(B, H, T, E))
        self.value = nn.Parameter(torch.randn(B, H, T, E))
        self.bias = nn.Parameter(torch.randn(rows, T))
        self.register_buffer("seen", torch.ones(T, T, dtype=torch.bool).tril())
        self.lower = torch.ones(T, T, dtype=torch.bool).tril()
        self.odd = torch.arange(T)[:, None] % 2 == torch.arange(T) % 2
        self.masks = masks

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        query = self.query * x + self.bias.mean()
        return tuple(F.scaled_dot_product_attention(query, self.key, self.value, m(self, x)) for m in self.masks)


def notes(masks: dict[str, Mask]) -> dict[str, Call]:
    """What becomes of each mask; the results are those of the model."""
    torch.manual_seed(0)
    model = Attention(*masks.values())
    x = torch.randn(B, H, T, E)
    assert_equivalent(model.double(), (x.double(),))
    return dict(zip(masks, calls(model.float(), (x,)), strict=True))


def rows() -> Tensor:
    return torch.arange(T)[:, None]


def columns() -> Tensor:
    return torch.arange(T)


def ones() -> Tensor:
    return torch.ones(T, T, dtype=torch.bool)


def minus(value: float) -> Mask:
    return lambda m, x: torch.zeros(T, T, dtype=x.dtype).masked_fill(~ones().tril(), value)


CAUSAL: dict[str, Mask] = {
    "tril": lambda m, x: ones().tril(),
    "tril of numbers": lambda m, x: torch.tril(torch.ones(T, T)) == 1,
    "tril, one for each of the batch": lambda m, x: ones().tril().expand(B, 1, T, T),
    "triu of -inf": lambda m, x: torch.full((T, T), -torch.inf, dtype=x.dtype).triu(1),
    "nn.Transformer": lambda m, x: nn.Transformer.generate_square_subsequent_mask(T, dtype=x.dtype),
    "masked_fill": minus(-torch.inf),
    "a finite number": minus(-1e9),
    "the least number": lambda m, x: torch.zeros(T, T, dtype=x.dtype).masked_fill(
        ones().triu(1), torch.finfo(x.dtype).min
    ),
    "counted": lambda m, x: columns() <= rows(),
    "arange >= arange": lambda m, x: rows() >= columns(),
    "not": lambda m, x: ~(columns() > rows()),
    "products": lambda m, x: (1 - ones().tril().to(x.dtype)) * torch.finfo(x.dtype).min,
    "logarithm": lambda m, x: ones().tril().to(x.dtype).log(),
    "two sums": lambda m, x: (
        torch.where(ones().tril(), 0.0, -torch.inf) + torch.where(rows() - columns() < 100, 0.0, -torch.inf)
    ),
    "and": lambda m, x: (columns() <= rows()) & (columns() > rows() - T),
    "or": lambda m, x: (columns() < rows()) | (columns() == rows()),
    "the same segment": lambda m, x: (columns() <= rows()) & (rows() // 8 == columns() // 8),
    "part of a longer one": lambda m, x: torch.ones(9, 9, dtype=torch.bool).tril()[None, None, :T, :T],
    "turned": lambda m, x: ones().triu().T,
    "flipped": lambda m, x: (columns() >= rows()).flip(0, 1),
    "a lookup": lambda m, x: torch.ones(T + 2, T + 2, dtype=torch.bool).tril()[rows(), columns()],
    "a constant": lambda m, x: m.lower,
    "a constant of positions": lambda m, x: torch.tensor([0, 1, 2, 3, 4, 5]) <= rows(),
    "cat": lambda m, x: torch.cat([ones().tril()[:, :2], ones().tril()[:, 2:]], 1),
    "pad": lambda m, x: (
        F.pad(torch.ones(T, T - 1).tril(-1), (0, 1)).logical_not().logical_not() | (rows() == columns())
    ),
    "in whole numbers of 32 bits": lambda m, x: torch.arange(T, dtype=torch.int32) <= rows().int(),
    "as numbers": lambda m, x: torch.arange(T, dtype=torch.float32) - rows().float() <= 0,
    "positions as a sum": lambda m, x: torch.ones(T, dtype=torch.int64).cumsum(0) <= rows() + 1,
    "reshaped": lambda m, x: torch.arange(T).reshape(1, 1, 1, T) <= torch.arange(T).view(1, 1, T, 1),
    "a matrix of positions": lambda m, x: columns().repeat(T, 1) <= rows().expand(T, T),
}
NONE: dict[str, Mask] = {
    "ones": lambda m, x: ones(),
    "one row": lambda m, x: torch.ones(1, T, dtype=torch.bool),
    "for each of the batch": lambda m, x: torch.ones(B, 1, 1, T, dtype=torch.bool),
    "zeros": lambda m, x: torch.zeros(T, T, dtype=x.dtype),
    "all positions": lambda m, x: (rows() >= 0) & (columns() >= 0),
    "before or after": lambda m, x: (columns() <= rows()) | (columns() > rows()),
    "padding that is none": lambda m, x: (1 - torch.ones(B, 1, 1, T, dtype=x.dtype)) * -1e30,
    "None": lambda m, x: None,
}


def test_causal_masks() -> None:
    assert notes(CAUSAL) == dict.fromkeys(CAUSAL, ("causal", False, True, False, H))


def test_masks_that_hide_nothing() -> None:
    assert notes(NONE) == dict.fromkeys(NONE, ("no mask", False, False, False, H))


KEPT: dict[str, tuple[str, Mask]] = {
    "window 3": ("window 3", lambda m, x: ones().tril() & ones().triu(-2)),
    "distance": ("window of 1 before and 1 after", lambda m, x: (rows() - columns()).abs() <= 1),
    "one column more": ("window of all before and 1 after", lambda m, x: rows() >= columns() - 1),
    "without itself": ("window of all before and -1 after", lambda m, x: rows() > columns()),
    "later ones": ("window of 0 before and all after", lambda m, x: rows() <= columns()),
    "a buffer": ("mask kept: depends on buffer seen", lambda m, x: m.seen),
    "an input": ("mask kept: depends on x", lambda m, x: ones().tril() & (x[:, :, 0, :T].mean((0, 1)) > -9)),
    "a parameter": ("mask kept: depends on bias", lambda m, x: torch.where(ones().tril(), m.bias, -torch.inf)),
    "chunks": ("mask kept: rows see more than one stretch of columns", lambda m, x: rows() // 3 == columns() // 3),
    "not far enough": ("mask kept: adds -100 to scores", minus(-100.0)),
    "distances": (
        "mask kept: adds a bias that depends on the position",
        lambda m, x: torch.where(columns() <= rows(), columns() - rows(), -(2**40)).to(x.dtype),
    ),
    "nothing": ("mask kept: rows see nothing", lambda m, x: torch.full((T, T), -1e9, dtype=x.dtype)),
    "some columns": (
        "mask kept: rows see columns that do not move with them",
        lambda m, x: (columns() < 4).expand(T, T),
    ),
    "one of the batch": (
        "mask kept: depends on the place in the batch or on the head",
        lambda m, x: ones().tril() & (torch.arange(B) < 1).view(B, 1, 1, 1),
    ),
    "a constant": ("mask kept: depends on a constant that is no band of two numbers", lambda m, x: m.odd),
    "random": ("mask kept: depends on rand", lambda m, x: torch.rand(T, T) > -1),  # whatever is drawn
    "twice as steep": (
        "mask kept: rows see columns that do not move with them",
        lambda m, x: columns() <= 2 * rows(),
    ),
    "overflow": (
        "mask kept: positions do not fit int8",
        lambda m, x: torch.arange(T, dtype=torch.int8)[None] * 50 >= 0,
    ),
}


def test_masks_that_stay() -> None:
    masks = {name: mask for name, (_, mask) in KEPT.items()}
    assert notes(masks) == {name: (note, True, False, False, H) for name, (note, _) in KEPT.items()}


def test_rows_that_see_nothing_are_as_in_the_model() -> None:
    """A finite number spreads the weights of such a row, True and False give zeros: neither is made the other."""
    torch.manual_seed(0)
    x = torch.randn(B, H, T, E)
    model = Attention(
        lambda m, x: rows() > columns(),
        lambda m, x: torch.where(rows() > columns(), 0.0, -1e9).to(x.dtype),
        lambda m, x: torch.zeros(T, T, dtype=torch.bool),
    )
    for found, expected in zip(autopar.trace(model, (x,)).module()(x), model(x), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("count", [1, 4, 9])
def test_causal_is_counted_from_the_first_row_and_column(count: int) -> None:
    """`is_causal` of torch: row 0 sees column 0, whether there are more rows or more columns."""
    torch.manual_seed(0)
    x = torch.randn(B, H, count, E)
    model = Attention(
        lambda m, x: torch.arange(count)[:, None] >= columns(),
        lambda m, x: torch.arange(count)[:, None] + (T - count) >= columns(),
        rows=count,
    )
    last = {1: "no mask", 4: "window of all before and 2 after", 9: "window of all before and -3 after"}[count]
    assert calls(model, (x,)) == [("causal", False, True, False, H), (last, count != 1, False, False, H)]
    for found, expected in zip(autopar.trace(model, (x,)).module()(x), model(x), strict=True):
        assert torch.allclose(found, expected, atol=1e-6)


def test_a_mask_that_makes_the_batch_stays() -> None:
    class Wide(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, q, q, torch.ones(B, H, T, T, dtype=torch.bool))

    q = torch.randn(1, H, T, E)
    note = "mask kept: no mask, but the result has its leading dims"
    assert calls(Wide(), (q,)) == [(note, True, False, False, H)]


def test_a_mask_with_other_uses_is_still_computed() -> None:
    class Shown(nn.Module):
        def forward(self, q: Tensor) -> tuple[Tensor, Tensor]:
            mask = torch.ones(T, T, dtype=torch.bool).tril()
            return F.scaled_dot_product_attention(q, q, q, mask), mask

    q = torch.randn(B, H, T, E)
    assert calls(Shown(), (q,)) == [("causal", False, True, False, H)]
    graph = export(Shown(), (q,)).graph_module.graph
    assert graph.find_nodes(op="call_function", target=torch.ops.aten.tril.default)


def test_the_mask_leaves_the_graph() -> None:
    x = torch.randn(B, H, T, E)
    names = {str(node.target) for node in export(Attention(CAUSAL["masked_fill"]), (x,)).graph_module.graph.nodes}
    assert not any("fill" in name or "tril" in name or "zeros" in name for name in names)


def test_scale_and_dropout_stay() -> None:
    class Scaled(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, q, q, torch.ones(T, T).tril() > 0, dropout_p=0.3, scale=0.7)

    q = torch.randn(B, H, T, E)
    (node,) = export(Scaled(), (q,)).graph_module.graph.find_nodes(op="call_function", target=SDPA)
    given = arguments_of(node)
    assert (given["dropout_p"], given["scale"], given["is_causal"], given["attn_mask"]) == (0.3, 0.7, True, None)
    assert_equivalent(Scaled(), (q,))


# -- random expressions ----------------------------------------------------------------------------------------------


def random_mask(pick: random.Random, row: Tensor, column: Tensor, depth: int) -> Tensor:
    """A boolean matrix from positions, sums, comparisons, and, or, not, triangles, slices and turns."""
    if depth == 0 or pick.random() < 0.25:
        first, second = (row, column) if pick.random() < 0.5 else (column, row)
        left = first + pick.randint(-4, 4) if pick.random() < 0.6 else first - second
        right = second if pick.random() < 0.6 else torch.full((), pick.randint(-5, 5))
        operators = (torch.le, torch.lt, torch.ge, torch.gt, torch.eq, torch.ne)
        return pick.choice(operators)(left, right).expand(row.shape[0], column.shape[1])
    kind = pick.choice(("and", "or", "not", "tril", "triu", "where", "flip", "as numbers", "distance"))
    first = random_mask(pick, row, column, depth - 1)
    if kind == "not":
        return ~first
    if kind in ("tril", "triu"):
        return getattr(first, kind)(pick.randint(-3, 3))
    if kind == "flip":
        return first.flip(0).flip(1)
    if kind == "as numbers":
        return (first.to(torch.float32) * 2 - 1) > pick.choice((-2.0, 0.0))
    if kind == "distance":
        return first & ((row - column).abs() <= pick.randint(0, 4))
    second = random_mask(pick, row, column, depth - 1)
    if kind == "where":
        return torch.where(first, second, random_mask(pick, row, column, 0))
    return first & second if kind == "and" else first | second


def band_by_value(mask: Tensor) -> Band | None:
    """The narrowest band that is this mask; None where there is none, or where no row sees anything."""
    apart = torch.arange(mask.shape[1]) - torch.arange(mask.shape[0])[:, None]
    if mask.all():
        return Band(None, None)
    if not mask.any():
        return None
    low, high = int(apart[mask].min()), int(apart[mask].max())
    if not torch.equal(mask, (apart >= low) & (apart <= high)):
        return None
    return Band(None if low == int(apart.min()) else -low, None if high == int(apart.max()) else high)


class Drawn(nn.Module):
    """Attention with ten random masks, of the same rows and columns."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seeds = range(seed, seed + 10)
        self.extents = random.Random(seed).choice(((7, 7), (5, 8), (8, 5), (1, 6)))

    def expressions(self) -> list[Tensor]:
        count, width = self.extents
        places = torch.arange(count)[:, None], torch.arange(width)[None]
        return [random_mask(random.Random(seed), *places, 3) for seed in self.seeds]

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        return tuple(F.scaled_dot_product_attention(q, k, k, mask) for mask in self.expressions())


@pytest.mark.parametrize("seed", range(0, 200, 10))
def test_the_band_that_is_read_is_that_of_the_mask(seed: int) -> None:
    """What is read is always right, and all bands but a few are read."""
    model = Drawn(seed)
    count, width = model.extents
    q, k = torch.randn(1, 1, count, 4), torch.randn(1, 1, width, 4)
    nodes = export(model, (q, k)).graph_module.graph.find_nodes(op="call_function", target=SDPA)
    missed = []
    for number, node, mask in zip(model.seeds, nodes, model.expressions(), strict=True):
        note, given = node.meta[ATTENTION_NOTE], arguments_of(node)
        found = {"no mask": Band(None, None), "causal": Band(None, 0)}.get(note.mask, note.band)
        assert (given["attn_mask"] is None) == (note.mask in ("no mask", "causal"))
        assert given["is_causal"] == (note.mask == "causal")
        expected = band_by_value(mask)
        if found is not None:
            assert torch.equal(matrix(found, count, width), mask), number
        elif expected is not None:
            missed.append((number, note.mask, expected))
    assert not missed, missed


def matrix(band: Band, count: int, width: int) -> Tensor:
    apart = torch.arange(width) - torch.arange(count)[:, None]
    left = torch.ones_like(apart, dtype=torch.bool) if band.left is None else apart >= -band.left
    right = torch.ones_like(apart, dtype=torch.bool) if band.right is None else apart <= band.right
    return left & right


# -- repeated heads ---------------------------------------------------------------------------------------------------

KV = 2


def hugging_face(x: Tensor, times: int) -> Tensor:
    wide = x[:, :, None, :, :].expand(B, x.shape[1], times, T, E)
    return wide.reshape(B, x.shape[1] * times, T, E)


def before_the_turn(x: Tensor, times: int) -> Tensor:
    """Repeated as `batch seq heads head_dim`, then turned."""
    turned = x.transpose(1, 2)
    wide = turned[:, :, :, None, :].expand(B, T, x.shape[1], times, E).reshape(B, T, x.shape[1] * times, E)
    return wide.permute(0, 2, 1, 3).contiguous()


REPEATS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "repeat_interleave": lambda x, times: x.repeat_interleave(times, dim=1),
    "expand and reshape": hugging_face,
    "before the turn": before_the_turn,
    "cast after it": lambda x, times: hugging_face(x, times).double().to(x.dtype),
}


class Grouped(nn.Module):
    def __init__(self, keys: Callable[[Tensor], Tensor], values: Callable[[Tensor], Tensor], kv: int = KV) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(B, H, T, E))
        self.key = nn.Parameter(torch.randn(B, kv, T, E))
        self.value = nn.Parameter(torch.randn(B, kv, T, E))
        self.keys, self.values = keys, values

    def forward(self, x: Tensor) -> Tensor:
        keys, values = self.keys(self.key * 2), self.values(self.value * 3)
        return F.scaled_dot_product_attention(self.query * x, keys, values, is_causal=True)


@pytest.mark.parametrize("name", REPEATS)
def test_repeated_heads_are_undone(name: str) -> None:
    torch.manual_seed(0)
    model = Grouped(*[lambda x: REPEATS[name](x, H // KV)] * 2)
    x = torch.randn(B, H, T, E)
    assert calls(model, (x,)) == [("causal", False, True, True, KV)]
    assert_equivalent(model, (x,), dtype=torch.float32)
    targets = {str(node.target) for node in export(model, (x,)).graph_module.graph.nodes}
    assert not any("expand" in target or "interleave" in target for target in targets)


def test_one_head_that_is_expanded() -> None:
    torch.manual_seed(0)
    model = Grouped(*[lambda x: x.expand(-1, H, -1, -1)] * 2, kv=1)
    x = torch.randn(B, H, T, E)
    assert calls(model, (x,)) == [("causal", False, True, True, 1)]
    assert_equivalent(model, (x,))


STAY: dict[str, tuple[str, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "keys alone": (
        "causal; heads stay repeated: values are not repeated alike",
        lambda x: hugging_face(x, 2),
        lambda x: torch.cat([x, x * 2], 1),
    ),
    "tiles": ("causal", lambda x: x.repeat(1, 2, 1, 1), lambda x: x.repeat(1, 2, 1, 1)),
    "the dim before": (
        "causal",
        lambda x: x[:, None].expand(B, 2, KV, T, E).reshape(B, H, T, E),
        lambda x: x[:, None].expand(B, 2, KV, T, E).reshape(B, H, T, E),
    ),
}


@pytest.mark.parametrize("name", STAY)
def test_heads_that_are_not_repeated_alike_stay(name: str) -> None:
    note, keys, values = STAY[name]
    torch.manual_seed(0)
    model = Grouped(keys, values)
    x = torch.randn(B, H, T, E)
    assert calls(model, (x,)) == [(note, False, True, False, H)]
    assert_equivalent(model, (x,))


def test_repeated_keys_that_are_returned_are_still_computed() -> None:
    class Cached(Grouped):
        def forward(self, x: Tensor) -> Tensor:
            keys, values = hugging_face(self.key, 2), hugging_face(self.value, 2)
            attended = F.scaled_dot_product_attention(self.query * x, keys, values)
            return torch.cat([attended, keys])

    torch.manual_seed(0)
    model = Cached(lambda x: x, lambda x: x)
    x = torch.randn(B, H, T, E)
    assert calls(model, (x,)) == [("no mask", False, False, True, KV)]
    assert_equivalent(model, (x,))


def test_checkpointed_layers() -> None:
    torch.manual_seed(0)
    model, inputs = hf("llama", train=True)
    model.activation_checkpointing_enable()
    assert Counter(calls(model, inputs)) == {causal(2, True): 2}
    assert_equivalent(model, inputs)


def test_a_trace_says_what_became_of_masks() -> None:
    model, inputs = hf("gemma3_text", num_hidden_layers=4)
    text = str(autopar.trace(model, inputs))
    block = text[text.index("\nattention\n") :].split("\n\n")[0].strip().splitlines()
    assert block == [
        "attention",
        "  window 5  2 times  model.layers.0.self_attn ... model.layers.2.self_attn",
        "  causal    2 times  model.layers.1.self_attn ... model.layers.3.self_attn",
    ]
    given = {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])}
    assert "  mask kept: depends on attention_mask  4 times  model.layers.0" in str(autopar.trace(model, given))
    data = autopar.trace(model, inputs).to_json()["ops"]
    found = [op["attention"] for op in data if op["attention"]]
    assert found[:2] == [
        {"mask": "window 5", "heads": "", "band": [4, 0], "document_share": None},
        {"mask": "causal", "heads": "", "band": None, "document_share": None},
    ]
