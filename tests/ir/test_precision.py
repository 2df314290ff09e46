"""The words of a precision, what it means for a parameter, and models traced in it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import AutoparError
from autopar.ir.precision import OWN, PRESETS, Precision, parse_precision


@pytest.mark.parametrize(
    "text",
    [
        *PRESETS,
        "bf16, reduce=bf16",
        "bf16, states=bf16, reduce=bf16",
        "bf16, reduce=bf16, linears=fp8",
        "bf16, linears=fp8-rows, gathers=fp8",
        "fp32, states=fp16",
    ],
)
def test_text_is_read_back(text: str) -> None:
    assert str(parse_precision(text)) == text
    assert parse_precision(parse_precision(text)) == parse_precision(text)


def test_fields_that_make_another_preset_have_its_name() -> None:
    pure = parse_precision("bf16, master=bf16,states=bf16 ,  reduce=bf16")
    assert (str(pure), pure) == ("bf16-pure", PRESETS["bf16-pure"])
    assert parse_precision(None) == OWN == Precision()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bf61", "no preset is called 'bf61'; did you mean 'bf16'?"),
        ("", "no preset is called ''"),
        (
            "bf16, masters=fp32",
            "unknown field 'masters'; did you mean 'master'?: expected compute, master, states, reduce",
        ),
        ("bf16, reduce=float32", "unknown reduce 'float32'"),
        ("bf16, reduce", "unknown reduce ''"),
        ("bf16, linears=fp9", "unknown linears 'fp9'; did you mean 'fp8'?: expected fp8, fp8-rows"),
        ("fp16, linears=fp8", "linears in float8 need compute in bf16, got fp16"),
        ("bf16, gathers=fp8", "weights are gathered in float8 for linears in float8: add linears=fp8"),
        ("fp8, gathers=fp8-rows", "unknown gathers 'fp8-rows': expected fp8"),
        ("own, reduce=bf16", "'own' has no fields"),
    ],
)
def test_mistakes(text: str, message: str) -> None:
    with pytest.raises(AutoparError) as error:
        parse_precision(text)
    assert f"invalid precision '{text}': {message}" in str(error.value)
    assert "\nfix: one of own, fp64, fp32, bf16, bf16-pure, fp16, fp8, fp8-rows; or a preset with fields" in str(
        error.value
    )


def test_dtypes_of_a_parameter() -> None:
    bf16 = parse_precision("bf16, states=bf16, reduce=bf16")
    for dtype, stored, state in (
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.int8, torch.int8, torch.int8),
        (torch.complex64, torch.complex64, torch.complex64),
    ):
        trained = bf16.stored(dtype, frozen=False)
        assert (trained, bf16.state(dtype), bf16.reduced(dtype)) == (stored, state, state)
        assert bf16.stored(dtype, frozen=True) == dtype, "nothing updates it"
    assert OWN.stored(torch.float16, frozen=False) == OWN.stored(torch.float16, frozen=True) == torch.float16
    assert OWN.state(torch.float16) == OWN.reduced(torch.float16) == torch.float16
    assert (OWN.compute_dtype, bf16.compute_dtype) == (None, torch.bfloat16)


class Scaled(nn.Module):
    """A model with a float buffer, an integer parameter, and an integer input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.codes = nn.Parameter(torch.arange(8), requires_grad=False)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight * self.scale)[rows] + self.codes


def test_a_trace_computes_in_the_dtype_and_leaves_the_model_alone() -> None:
    model, inputs = Scaled(), (torch.randn(4, 8), torch.tensor([0, 1]))
    graph = autopar.trace(model, inputs, precision="bf16")
    kinds = {name: str(graph.tensors[name].dtype).removeprefix("torch.") for name in ("weight", "codes", "scale", "x")}
    assert kinds == {"weight": "bfloat16", "codes": "int64", "scale": "float32", "x": "bfloat16"}
    assert model.weight.dtype is torch.float32
    assert model.weight.untyped_storage().nbytes() == 256
    with pytest.raises(AutoparError, match=r"(?s)no weights: .*fix: trace the model in its own dtypes"):
        graph.module()
    assert autopar.trace(model, inputs, precision="fp32").module()(*inputs).equal(model(*inputs))
