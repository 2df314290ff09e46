"""Names of dims: by structure in models of many kinds, by the user, and kept apart where they must be."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import DimsError
from examples.hf import hf

TEXT = {"batch", "seq", "d_model", "heads", "head_dim", "d_ff", "vocab"}
IMAGE = {"batch", "channels", "height", "width"}
TRANSFORMED_IMAGE = IMAGE | {"d_model", "heads", "head_dim", "d_ff", "seq"}

STANDARD_NAMES = {
    "gpt2": TEXT | {"position"},
    "llama": TEXT | {"kv_heads"},
    "mistral": TEXT | {"kv_heads"},
    "qwen3": TEXT | {"kv_heads"},
    "gemma2": TEXT | {"kv_heads"},
    "phi3": TEXT,
    "bert": TEXT | {"position", "types"},
    "deberta-v2": TEXT,
    "t5": TEXT,
    "bart": TEXT | {"position"},
    "vit": TRANSFORMED_IMAGE,
    "swin": TRANSFORMED_IMAGE,
    "resnet": IMAGE,
    "convnext": IMAGE | {"d_ff"},
    "whisper": TEXT,
    "wav2vec2": TEXT - {"vocab"},
    "clip": TEXT | IMAGE,
    "deepseek_v3": TEXT | {"low_rank"},
    "albert": TEXT | {"position", "types"},
    "mixtral": TEXT | {"kv_heads", "expert"},
    "qwen3_moe": TEXT | {"kv_heads", "expert"},
}

WEIGHTS = {
    "gpt2": {
        "transformer.wte.weight": "vocab d_model",
        "transformer.wpe.weight": "position d_model",
        "transformer.h.1.attn.c_proj.weight": "(heads head_dim) d_model",
        "transformer.h.1.mlp.c_fc.weight": "d_model d_ff",
        "transformer.h.1.mlp.c_proj.weight": "d_ff d_model",
    },
    "llama": {
        "model.embed_tokens.weight": "vocab d_model",
        "model.layers.1.self_attn.q_proj.weight": "(heads head_dim) d_model",
        "model.layers.1.self_attn.k_proj.weight": "(kv_heads head_dim) d_model",
        "model.layers.1.self_attn.o_proj.weight": "d_model (heads head_dim)",
        "model.layers.1.mlp.down_proj.weight": "d_model d_ff",
        "lm_head.weight": "vocab d_model",
    },
    "t5": {
        "shared.weight": "vocab d_model",
        "encoder.block.0.layer.0.SelfAttention.q.weight": "(heads head_dim) d_model",
        "decoder.block.1.layer.1.EncDecAttention.o.weight": "d_model (heads head_dim)",
        "decoder.block.1.layer.2.DenseReluDense.wi.weight": "d_ff d_model",
    },
    "vit": {
        "vit.layers.0.attention.o_proj.weight": "d_model (heads head_dim)",
        "vit.layers.1.mlp.fc1.weight": "d_ff d_model",
    },
    "deepseek_v3": {
        "model.layers.0.self_attn.q_a_proj.weight": "low_rank d_model",
        "model.layers.0.self_attn.q_b_proj.weight": "(heads head_dim) low_rank",
        "model.layers.0.self_attn.kv_a_layernorm.weight": "low_rank",
        "model.layers.0.mlp.down_proj.weight": "d_model d_ff",
    },
    "albert": {"albert.embeddings.word_embeddings.weight": "vocab d0"},
    "mixtral": {"model.layers.0.mlp.experts.down_proj": "expert d_model d_ff"},
}


LONG = ("albert", "mixtral", "swin")


def quick_first(names: Iterable[str]) -> list[Any]:
    """The architectures, of which those that take seconds are left to the long run."""
    return [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in names]


@pytest.mark.parametrize("architecture", quick_first(STANDARD_NAMES))
def test_standard_names_are_found_by_structure(architecture: str) -> None:
    graph = autopar.trace(*hf(architecture))
    assert STANDARD_NAMES[architecture] <= set(graph.dims)
    for name, dims in WEIGHTS.get(architecture, {}).items():
        assert " ".join(graph.tensors[name].dims) == dims, name
    for tensor in graph.tensors.values():
        named = [dim for dim in tensor.dims if dim != "1"]
        assert len(named) == len(set(named)), f"{tensor} has a name twice"


EQUAL = {
    "llama": {"batch": 4, "seq": 4, "intermediate_size": 48, "head_dim": 4, "vocab_size": 48},
    "gpt2": {"batch": 48, "seq": 48, "n_inner": 48, "vocab_size": 48, "n_positions": 48},
    "bert": {"batch": 12, "seq": 12, "intermediate_size": 48, "vocab_size": 48, "max_position_embeddings": 48},
    "mixtral": {"batch": 4, "seq": 4, "intermediate_size": 48, "num_local_experts": 48, "vocab_size": 48},
}


@pytest.mark.parametrize("architecture", quick_first(EQUAL))
def test_equal_extents_do_not_confuse_names(architecture: str) -> None:
    graphs = [autopar.trace(*hf(architecture, **sizes)) for sizes in ({}, EQUAL[architecture])]
    first, second = ({tensor.name: tensor.dims for tensor in graph.parameters} for graph in graphs)
    assert first == second


def test_d_model_is_one_dim_along_the_residual_stream() -> None:
    graph = autopar.trace(*hf("llama"))
    stream = [t for t in graph.tensors.values() if t.kind == "activation" and t.dims == ("batch", "seq", "d_model")]
    assert len(stream) > 10
    assert "d_model.1" not in graph.dims
    assert graph.dims["d_model"].sizes == (48,)


class Attention(nn.Module):
    """Attention written out, a residual stream and a square weight on it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(24, 72, bias=False)
        self.out = nn.Linear(24, 24, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 6).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2) * 0.5).softmax(-1)
        return x + self.out((scores @ v).transpose(1, 2).flatten(2))


def test_attention_written_out_and_scores_kept_apart() -> None:
    graph = autopar.trace(Attention(), (torch.randn(2, 5, 24),))
    assert graph.tensors["x"].dims == ("batch", "seq", "d_model")
    assert graph.tensors["/softmax"].dims == ("batch", "heads", "seq", "seq.1")
    assert graph.tensors["out.weight"].dims == ("d_model", "(heads head_dim)")


class Square(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(24, 24, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mix(x)


def test_a_square_weight_on_the_stream_has_two_dims() -> None:
    graph = autopar.trace(Square(), (torch.randn(2, 24),))
    assert graph.tensors["mix.weight"].dims == ("d_model", "d_model.1")
    assert graph.tensors["mix/linear"].dims == graph.tensors["x"].dims == ("batch", "d_model")


def test_a_batch_of_one_keeps_its_name() -> None:
    graph = autopar.trace(Attention(), (torch.randn(1, 5, 24),))
    assert graph.tensors["x"].dims == ("batch", "seq", "d_model")
    assert graph.tensors["out/linear"].dims == ("batch", "seq", "d_model")


# -- names given by the user ------------------------------------------------------------------------------------------


def test_dims_argument_by_name_and_by_pattern() -> None:
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 7))
    graph = autopar.trace(model, (torch.randn(3, 6),), dims={"input": "rows features", "?.bias": "units"})
    assert graph.tensors["input"].dims == ("rows", "features")
    assert graph.tensors["0.weight"].dims == ("units", "features")
    assert graph.dims["units"].sizes == (10,)
    assert graph.dims["units"].source == "dims['?.bias']"
    assert graph.tensors["2.weight"].dims == ("units.1", "units")
    assert graph.tensors["2.bias"].dims == ("units.1",), "on its own tensor too: a class has one name"


def test_a_pattern_is_found_inside_a_module_too() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(6, 10), nn.Linear(10, 6)])})
    model.forward = lambda x: model["layers"][1](model["layers"][0](x).relu())  # type: ignore[method-assign]
    dims = {"*.0.weight": "hidden features", "1.weight": "features hidden"}
    graph = autopar.trace(model, (torch.randn(3, 6),), dims=dims)
    assert graph.tensors["layers.0.bias"].dims == ("hidden",)
    assert graph.tensors["layers.1.weight"].dims == ("features", "hidden")


def test_a_compound_is_named_by_its_parts() -> None:
    graph = autopar.trace(Attention(), (torch.randn(2, 5, 24),), dims={"out.weight": "_ (h e)"})
    assert graph.tensors["out.weight"].dims == ("d_model", "(h e)")
    assert graph.tensors["/softmax"].dims == ("batch", "h", "seq", "seq.1")


class Annotated(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return autopar.named(x * 2, "... time _").cumsum(1)


def test_named_inside_the_model() -> None:
    graph = autopar.trace(Annotated(), (torch.randn(2, 5, 3),))
    assert graph.tensors["x"].dims[1] == "time"
    assert [node.op for node in graph.nodes] == ["aten.mul.Tensor", "aten.cumsum.default"], "named leaves no op"
    x = torch.randn(2, 5, 3)
    assert autopar.named(x, "a b c") is x, "an identity when nothing is traced"


def test_jaxtyping_annotations_on_forward() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from jaxtyping import Float

    class Typed(nn.Module):
        def forward(
            self, x: Float[torch.Tensor, "rows time=5 #width"], y: Float[torch.Tensor, "*some depth"]
        ) -> tuple[torch.Tensor, torch.Tensor]:
            return x.exp(), y.exp()

    Typed.forward.__annotations__.update(
        x=Float[torch.Tensor, "rows time=5 #width"], y=Float[torch.Tensor, "*some depth"]
    )
    graph = autopar.trace(Typed(), (torch.randn(2, 5, 3), torch.randn(4, 6, 7)))
    assert graph.tensors["x"].dims == ("rows", "time", "width")
    assert graph.tensors["y"].dims[-1] == "depth"


def test_what_the_user_says_in_dims_wins_over_named() -> None:
    graph = autopar.trace(Annotated(), (torch.randn(2, 5, 3),), dims={"x": "a b c"})
    assert graph.tensors["/cumsum"].dims == ("a", "b", "c")


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ({"inputt": "a b"}, "dims['inputt']: no input, parameter or buffer has this name; did you mean 'input'?"),
        ({"input": "a"}, "dims['input']: 'a' names 1 dims, but the tensor has 2: [3, 6]"),
        (
            {"input": "a a"},
            "dims['input']: 'a a' gives the name 'a' to two dims of one tensor\nfix: give each a name of its own",
        ),
        ({"input": "a b$"}, "dims['input']: '$' cannot stand here"),
        ({"input": "a (b c"}, "dims['input']: a '(' is not closed"),
        ({"input": 3}, "dims['input']: expected text such as 'batch seq', got 3"),
        (
            {"input": "a b", "0.weight": "c d"},
            "dims['0.weight'] calls a dim 'd' that the model ties to 'b' of dims['input']\nfix: give both one name",
        ),
        ({"input": "a (b c)"}, "splits a dim of 6 into (b c), which the model does not\nfix: give the dim one name"),
    ],
)
def test_errors_in_names(dims: dict[str, str], message: str) -> None:
    with pytest.raises(DimsError) as caught:
        autopar.trace(nn.Sequential(nn.Linear(6, 10)), (torch.randn(3, 6),), dims=dims)
    assert message in str(caught.value)
