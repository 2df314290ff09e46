"""Batches padded to a few lengths have the loss and the gradients of the batch without padding."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch

import autopar
from autopar.errors import AutoparError
from tests.gaps import number
from tests.runtime.launcher import launch

LENGTHS = (8, 16)


def models() -> dict[str, Any]:
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    llama = transformers.LlamaConfig(**small, intermediate_size=32, num_key_value_heads=2)
    bert = transformers.BertConfig(
        **small, intermediate_size=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    t5 = transformers.T5Config(
        vocab_size=32,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    torch.manual_seed(0)
    return {
        "llama": transformers.LlamaForCausalLM(llama),
        "bert": transformers.BertForMaskedLM(bert),
        "t5": transformers.T5ForConditionalGeneration(t5),
    }


def batch_of(name: str, length: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(length)
    ids = torch.randint(1, 32, (4, length))
    labels = torch.randint(1, 32, (4, length if name != "t5" else length // 2 + 1))
    labels[0, :2] = -100
    mask = torch.ones_like(ids)
    mask[1, length - 1 :] = 0
    if name == "llama":
        return {"input_ids": ids, "labels": labels}  # a mask is added
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def padded() -> dict[str, float]:
    """The largest difference of the loss and of gradients from one process without padding."""
    gaps = {}
    for name, model in models().items():
        model = model.double()
        start = autopar.pad_to_lengths(batch_of(name, 8), LENGTHS)
        parallel = autopar.parallelize(deepcopy(model), "dp=2", start, layout="ddp")
        found = []
        for length in (5, 8, 11, 16, 7):
            batch = batch_of(name, length)
            model.zero_grad()
            parallel.zero_grad()
            wanted, own = model(**batch).loss, parallel(**autopar.pad_to_lengths(batch, LENGTHS)).loss
            wanted.backward()
            own.backward()
            found.append(number((own - wanted).abs()))
            for key, parameter in model.named_parameters():
                if parameter.grad is not None:
                    gradient = parallel.get_parameter(key).grad.full_tensor()
                    found.append(number((gradient - parameter.grad).abs().max()))
        gaps[name] = max(found)
        assert len({key for call in parallel._plans.kept for key in [call.held["input_ids"].shape]}) == 2
    return gaps


@pytest.mark.slow
def test_padded_batches_train_as_others() -> None:
    for gaps in launch(padded, ranks=2):
        # transformers computes losses in float32.
        assert all(gap < 1e-6 for gap in gaps.values()), gaps


def test_all_of_a_batch_is_padded() -> None:
    batch = batch_of("t5", 5) | {"inputs": "text", "weight": torch.ones(4), "extra": torch.ones(4, 5)}
    found = autopar.pad_to_lengths(batch, LENGTHS, fill={"extra": 7})
    assert {
        name: tuple(found[name].shape) for name in ("input_ids", "attention_mask", "labels", "extra", "weight")
    } == {
        "input_ids": (4, 8),
        "attention_mask": (4, 8),
        "labels": (4, 8),
        "extra": (4, 8),
        "weight": (4,),
    }
    assert found["labels"][:, 3:].unique().tolist() == [-100]
    assert found["extra"][:, 5:].unique().tolist() == [7]
    assert found["attention_mask"][:, 5:].sum() == 0
    assert found["inputs"] == "text"
    same = autopar.pad_to_lengths(batch_of("bert", 8), LENGTHS)
    assert torch.equal(same["input_ids"], batch_of("bert", 8)["input_ids"])


def test_classes_of_samples_are_no_sequence() -> None:
    batch = {"input_ids": torch.ones(2, 5, dtype=torch.long), "labels": torch.rand(2, 5)}
    assert autopar.pad_to_lengths(batch, LENGTHS)["labels"].shape == (2, 5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"input_ids": torch.ones(2, 17, dtype=torch.long)}, "input_ids has a sequence of 17: expected at most 16"),
        ({"spans": torch.ones(2, 5)}, r"spans may have a sequence of 5.*\nfix: fill=\{'spans': 0\}"),
        ({"attention_mask": torch.ones(2, 1, 5, 5)}, r"wrong mask attention_mask: .* got the shape \[2, 1, 5, 5\]"),
    ],
)
def test_what_cannot_be_padded(change: dict[str, torch.Tensor], said: str) -> None:
    with pytest.raises(AutoparError, match=said):
        autopar.pad_to_lengths({"input_ids": torch.ones(2, 5, dtype=torch.long)} | change, LENGTHS)
