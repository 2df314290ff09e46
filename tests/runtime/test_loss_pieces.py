"""A loss in pieces on real ranks: what one process gets from whole logits, with less memory."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.rules.shard_call import loss_pieces
from tests.runtime.launcher import launch

VOCAB, BATCH, SEQ = 96, 8, 16
SIZES = {"vocab_size": VOCAB, "max_position_embeddings": SEQ}


def llama(**more: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**SIZES, **shape, num_key_value_heads=2, use_cache=False, **more))


def gpt2() -> nn.Module:
    """With the vocabulary's table for the last layer too."""
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {"n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 1, "use_cache": False}
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_positions=SEQ, loss_type="ForCausalLM", **shape, **rates))  # type: ignore[call-arg]


def gemma2() -> nn.Module:
    """With a soft cap between the last layer and the loss."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    cap = {"final_logit_softcapping": 2.0, "head_dim": 8, "num_key_value_heads": 2, "use_cache": False}
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, **shape, **cap))


MODELS = {"llama": llama, "gpt2": gpt2, "gemma2": gemma2}


def inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, VOCAB, (BATCH, SEQ), generator=generator)
    # Each sample ignores another number of its targets.
    ignored = torch.arange(SEQ) < torch.arange(BATCH).unsqueeze(1)
    return {"input_ids": ids, "labels": ids.masked_fill(ignored, -100)}


class Norm(nn.Module):
    """The norm of Llama and Gemma in the dtype of its input, where those compute in float32."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.weight, self.offset = own.weight, float("Gemma" in type(own).__name__)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (self.weight + self.offset)


def doubled(model: nn.Module) -> nn.Module:
    """Return the model in float64 throughout: else differences are those of float32."""
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            model.set_submodule(name, Norm(module))
    return model.double()


def step(mesh: str, name: str, layout: str) -> dict[str, float]:
    """Return the differences from one process: of the loss, and the largest of all gradients."""
    torch.manual_seed(0)
    model, given = doubled(MODELS[name]()), inputs()
    parallel = autopar.parallelize(copy.deepcopy(model), mesh, given, layout=layout, outputs="loss")
    expected, found = model(**given), parallel(**given)
    assert found.logits is None
    expected.loss.backward()
    found.loss.backward()
    apart = 0.0
    for parameter, one in model.named_parameters():
        gradient: Any = parallel.get_parameter(parameter).grad
        apart = max(apart, float((one.grad - gradient.full_tensor()).abs().max()))
    return {"loss": float((expected.loss - found.loss).detach().abs()), "gradients": apart}


LAYOUTS = {
    "a=2": {
        "rows": "pieces 3; batch -> a; * -> none",
        "classes": "pieces 4; vocab -> a; * -> none",
        "sequence": "pieces 2; seq -> a; * -> none",
        "fsdp": "pieces 4; fsdp",
        "micro-batches": "micro 2; pieces 2; vocab -> a; * -> none",
    },
    "a=2,b=2": {
        "rows and classes": "pieces 3; batch -> a; vocab -> b; * -> none",
        "sequence and classes": "pieces 2; fold seq; seq -> a; vocab -> b; * -> none",
        "micro-batches": "micro 2; pieces 2; batch -> a; (heads, d_ff, vocab) -> b; * -> none",
        "pipeline": "micro 4; pipeline a 1f1b; pieces 2; vocab -> b; * -> none",
        "zero bubble": "micro 4; pipeline a zero_bubble; pieces 2; batch -> b; * -> none",
    },
}


def steps(mesh: str, names: tuple[str, ...]) -> dict[str, dict[str, float]]:
    found = {}
    mock.patch.object(Tensor, "float", Tensor.double).start()  # of the logits, before the loss
    for name in names:
        for place, layout in LAYOUTS[mesh].items():
            if "fold" in layout and name == "gemma2":
                continue  # its attention is written out
            found[f"{name}, {place}"] = step(mesh, name, layout)
    return found


def quick() -> dict[str, float]:
    """Return the differences of one case, and those of the same case with targets of one class further."""
    mock.patch.object(Tensor, "float", Tensor.double).start()
    layout = LAYOUTS["a=2"]["classes"]
    found = step("a=2", "gpt2", layout)
    places = loss_pieces._places
    with mock.patch.object(loss_pieces, "_places", lambda index, count: places(index + 1, count)):
        wrong = step("a=2", "gpt2", layout)
    return {**found, "wrong loss": wrong["loss"], "wrong gradients": wrong["gradients"]}


def test_split_classes() -> None:
    for apart in launch(quick, ranks=2):
        assert max(apart["loss"], apart["gradients"]) < 1e-10, apart
        assert min(apart["wrong loss"], apart["wrong gradients"]) > 1e-3, apart


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "names"),
    [
        ("a=2", ("llama",)),
        ("a=2", ("gpt2", "gemma2")),
        ("a=2,b=2", ("llama", "gpt2", "gemma2")),
    ],
)
def test_one_step(mesh: str, names: tuple[str, ...]) -> None:
    for rank in launch(steps, mesh, names, ranks=2 * mesh.count("=")):
        for place, apart in rank.items():
            assert max(apart.values()) < 1e-10, (place, apart)
