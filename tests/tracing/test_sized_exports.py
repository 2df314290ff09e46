"""Exports at many sizes: each equals that of a trace of its own, and models that look at sizes are traced."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.tracing.export.export import export
from autopar.tracing.export.symbolic import NotSymbolicError, export_symbolic, same_export
from autopar.tracing.sized_exports import MOST_REFUSED, SizedExports


class Sized(nn.Module):
    """A model with weights, a table, a mask and state for functions that look at sizes."""

    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.table = nn.Parameter(torch.randn(64, 8))
        self.register_buffer("mask", torch.ones(64, 64).tril().bool())
        self.length = 0
        self.cosine = torch.ones(1)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def branch(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) * 2 if x.shape[1] > 20 else m.linear(x) + 1


def table(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) + m.table[: x.shape[1]]


def mask(m: Any, x: Tensor) -> Tensor:
    length = x.shape[1]
    scores = (x @ m.linear(x).transpose(1, 2)).masked_fill(~m.mask[:length, :length], -1e9)
    return scores.softmax(-1) @ x


def padded(m: Any, x: Tensor) -> Tensor:
    y = nn.functional.pad(x, (0, 0, 0, -x.shape[1] % 8))
    return m.linear(y.reshape(x.shape[0], -1, 8, 8).mean(2))


def buckets(m: Any, x: Tensor) -> Tensor:
    places = torch.arange(x.shape[1])
    bucket = torch.bucketize(places[None] - places[:, None], torch.tensor([-8, -4, 0, 4, 8]))
    return m.linear(x) + m.table[bucket].mean(-1, keepdim=True).sum(1)


def interpolated(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) + nn.functional.interpolate(m.table.T[None], size=x.shape[1], mode="linear")[0].T


def window(m: Any, x: Tensor) -> Tensor:
    width, places = min(x.shape[1], 20), torch.arange(x.shape[1])
    near = (places[:, None] - places[None]).abs() < width
    return nn.functional.scaled_dot_product_attention(x, m.linear(x), x, attn_mask=near)


def cached(m: Any, x: Tensor) -> Tensor:
    if m.length != x.shape[1]:
        m.length = x.shape[1]
        m.cosine = torch.cos(torch.arange(m.length).float())
    return m.linear(x) + m.cosine[None, :, None]


def even(m: Any, x: Tensor) -> Tensor:
    pairs = x if x.shape[1] % 2 == 0 else x[:, :-1]
    return m.linear(pairs).reshape(x.shape[0], -1, 16)


def flat_loss(m: Any, x: Tensor) -> Tensor:
    y = x.flatten(0, 1)
    return nn.functional.mse_loss(m.linear(y), y)


def as_text(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) * (3 if f"{x.shape[1]}" in ("16", "24") else 1)


def in_set(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) * (3 if x.shape[1] in {16, 24} else 1)


def logarithm(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) * math.log(x.shape[1])


def in_tensor(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) + torch.tensor([x.shape[1]]).float()


def returned(m: Any, x: Tensor) -> tuple[Tensor, int]:
    return m.linear(x), x.shape[1]


def by_type(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) if isinstance(x.shape[1], int) else m.linear(x) * 2


def chunks(m: Any, x: Tensor) -> Tensor:
    return torch.stack([m.linear(x[:, i : i + 8]).sum(1) for i in range(0, x.shape[1], 8)], 1)


QUICK = (branch, mask, padded, as_text, by_type)


def marked(*functions: Callable[..., Any]) -> list[Any]:
    return [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in functions]


GENERAL = marked(branch, table, mask, padded, buckets, interpolated, window, cached, even, flat_loss)
FIXED = marked(as_text, in_set, logarithm, in_tensor, returned, by_type, chunks)


def agrees(found: Any, model: nn.Module, inputs: dict[str, Tensor]) -> bool:
    """Compare with a trace: the same graph, and the same numbers."""
    traced = export(model, inputs)
    if not same_export(found, traced):
        return False
    state = dict((*model.named_parameters(), *model.named_buffers()))

    def run(exported: Any) -> Any:
        sources = {"input": inputs, "param": state, "buffer": state, "constant": exported.constants}
        return exported.graph_module(*(sources[p.kind][p.name] for p in exported.placeholders))

    return all(torch.equal(one, other) for one, other in zip(run(found), run(traced), strict=True))


@pytest.mark.filterwarnings("ignore:the forward of Sized sets self.cosine")
@pytest.mark.parametrize("function", GENERAL)
def test_later_sizes_are_not_traced(function: Callable[..., Any]) -> None:
    model, exports = Sized(function), SizedExports()
    for length in (16, 18, 40, 17, 37):
        inputs = {"x": torch.randn(4, length, 8)}
        assert agrees(exports.export(model, inputs), model, inputs), length
    assert exports.captures, exports.refused
    assert exports.traces <= 3


@pytest.mark.parametrize("function", FIXED)
def test_code_that_needs_plain_sizes_is_traced(function: Callable[..., Any]) -> None:
    model, exports = Sized(function), SizedExports()
    lengths = (16, 18, 24, 17)
    for length in lengths:
        inputs = {"x": torch.randn(4, length, 8)}
        assert agrees(exports.export(model, inputs), model, inputs), length
    assert exports.traces == len(lengths)
    assert len(exports.refused) == MOST_REFUSED


def test_batch_and_length_and_sizes_of_one() -> None:
    model, exports = Sized(mask), SizedExports()
    for batch, length in ((4, 16), (4, 18), (3, 20), (5, 30), (1, 30), (4, 1), (1, 17), (1, 19)):
        inputs = {"x": torch.randn(batch, length, 8)}
        assert agrees(exports.export(model, inputs), model, inputs), (batch, length)
    before = exports.traces
    exports.export(model, {"x": torch.randn(7, 63, 8)})
    exports.export(model, {"x": torch.randn(1, 63, 8)})
    assert exports.traces == before


def test_strides_of_inputs_do_not_count() -> None:
    model, exports = Sized(mask), SizedExports()
    for length in (16, 18, 22):
        inputs = {"x": torch.randn(4, length + 1, 8)[:, :-1]}
        assert agrees(exports.export(model, inputs), model, inputs), length
    assert exports.traces == 1


def test_dynamic_says_when_sizes_become_symbolic() -> None:
    always, never = SizedExports(dynamic=True), SizedExports(dynamic=False)
    for length in (16, 18, 22):
        inputs = {"x": torch.randn(4, length, 8)}
        always.export(model := Sized(table), inputs)
        never.export(model, inputs)
    assert (always.traces, len(always.captures)) == (1, 1)
    assert (never.traces, len(never.captures)) == (3, 0)


def test_a_capture_that_differs_from_a_trace_is_refused() -> None:
    """The check against a trace sees another op, argument, constant or shape."""
    inputs = {"x": torch.randn(4, 16, 8)}
    one = export(Sized(table), inputs)
    assert same_export(one, export(Sized(table), inputs))
    assert not same_export(one, export(Sized(branch), inputs))
    assert not same_export(one, export(Sized(table), {"x": torch.randn(4, 17, 8)}))
    with_constant = export(Sized(in_tensor), inputs)
    assert with_constant.constants
    other = {name: value + 1 for name, value in with_constant.constants.items()}
    assert not same_export(with_constant, replace(with_constant, constants=other))


def test_guards_exclude_sizes_on_the_other_side_of_a_branch() -> None:
    made = export_symbolic(Sized(branch), {"x": torch.randn(4, 16, 8)}, ({1},))

    def serves(*shape: int) -> bool:
        return made.serves(replace(made.capture.flat, tensors=(torch.empty(shape),)))

    assert [serves(4, length, 8) for length in (2, 20, 21)] == [True, True, False]
    assert not serves(5, 16, 8)
    assert not serves(4, 1, 8)
    with pytest.raises(NotSymbolicError, match="fixes all sizes"):
        export_symbolic(Sized(logarithm), {"x": torch.randn(4, 16, 8)}, ({1},))


SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100,
    "max_position_embeddings": 128,
}  # fmt: skip


def of_transformers(kind: str) -> nn.Module:
    import transformers as hf

    if kind == "gpt2":
        return hf.GPT2LMHeadModel(
            hf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=100, n_positions=128, use_cache=False)
        )
    if kind == "t5":
        sizes = {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 4, "d_kv": 8, "vocab_size": 100}
        return hf.T5ForConditionalGeneration(hf.T5Config(**sizes, use_cache=False, decoder_start_token_id=0))  # type: ignore[call-arg]
    if kind == "vit":
        return hf.ViTForImageClassification(hf.ViTConfig(**SMALL, image_size=32, patch_size=8))
    if kind == "bert":
        return hf.BertForMaskedLM(hf.BertConfig(**SMALL))
    config, model = {
        "llama": (hf.LlamaConfig, hf.LlamaForCausalLM),
        "mixtral": (hf.MixtralConfig, hf.MixtralForCausalLM),
        "gemma2": (hf.Gemma2Config, hf.Gemma2ForCausalLM),
    }[kind]
    more = {"sliding_window": 16, "head_dim": 8} if kind == "gemma2" else {}
    more = {"num_local_experts": 4} if kind == "mixtral" else more
    return model(config(**SMALL, **more, num_key_value_heads=2, use_cache=False))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert", "t5", "vit", "mixtral", "gemma2"])
def test_models_of_transformers(kind: str) -> None:
    torch.manual_seed(0)
    model, exports = of_transformers(kind).eval(), SizedExports()
    for batch, length in ((4, 16), (4, 20), (4, 33), (3, 24), (3, 42), (5, 21)):
        ids = torch.randint(2, 90, (batch, length))
        inputs = {"input_ids": ids, "labels": ids}
        if kind == "vit":
            image = torch.randn(batch, 3, 8 * (length // 4), 8 * (length // 4))
            inputs = {"pixel_values": image, "interpolate_pos_encoding": True}  # type: ignore[dict-item]
        found = exports.export(model, inputs)
        assert same_export(found, export(model, inputs)), (batch, length)
    assert exports.traces < 6, exports.refused
