"""The traced graph, run as it is, gives the outputs and gradients of the standard architectures."""

from __future__ import annotations

import pytest
import torch

from benchmarks.architectures import STANDARD
from examples.hf import hf
from tests.equivalence import assert_equivalent

# In training wav2vec2 sets `requires_grad` on a view of its input, which torch refuses if the input has a gradient.
NO_INPUT_GRADIENTS = [("wav2vec2", "train")]


# The others are traced by other quick tests.
QUICK = ("phi3", "deberta-v2", "t5", "swin", "convnext", "whisper", "wav2vec2")


@pytest.mark.parametrize("mode", ["eval", pytest.param("train", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "architecture", [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in STANDARD]
)
def test_outputs_and_gradients_equal_the_models(architecture: str, mode: str) -> None:
    torch.manual_seed(0)
    model, inputs = hf(architecture, train=mode == "train", dropout=0.1)
    assert_equivalent(model, inputs, input_gradients=(architecture, mode) not in NO_INPUT_GRADIENTS)


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_with_labels_the_loss_and_its_gradients_are_equal(mode: str) -> None:
    torch.manual_seed(0)
    model, inputs = hf("gpt2", train=mode == "train")
    assert_equivalent(model, {**inputs, "labels": inputs["input_ids"]})


def test_experts_in_float32() -> None:
    torch.manual_seed(0)
    model, inputs = hf("mixtral")  # its grouped matrix product knows no float64
    assert_equivalent(model, inputs, dtype=torch.float32)


def test_dropout_is_on_in_training() -> None:
    torch.manual_seed(0)
    model, inputs = hf("gpt2", train=True, dropout=0.1)
    first, second = (model(**inputs).logits for _ in range(2))
    assert not torch.equal(first, second)
