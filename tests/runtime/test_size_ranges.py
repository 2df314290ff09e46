"""Calls of new sizes from the emitted graphs of others: equal to one process, and to a graph emitted at that size."""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.runtime.compiled_call import CallSignature, CompiledCall
from autopar.runtime.size_ranges import SizeRanges
from examples.gpt import gpt
from tests.gaps import number
from tests.runtime.launcher import in_turn, launch

SMALL: dict[str, Any] = {"layers": 2, "d_model": 24, "heads": 4, "vocab": 32}


class Branching(nn.Module):
    """A window, a branch on the length, and a length in the result."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if x.shape[1] > 20:
            hidden = hidden * 2
        window = hidden[:, -9:].cumsum(1)
        half = hidden[:, : (x.shape[1] + 1) // 2]
        return self.last(torch.cat([window, half], 1)).pow(2).sum() / x.shape[1]


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3, 2, 1), nn.MaxPool2d(2)
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean((2, 3))).pow(2).mean()


def compared(parallel: Any) -> dict[str, int]:
    """Compare each call of a line with a graph that is emitted at its size; count both kinds of calls."""
    plans, counts = parallel._plans, {"of lines": 0, "emitted": 0}
    plan = plans._plan

    def checked(given: CallSignature) -> CompiledCall:
        lines: SizeRanges = plans.kept.family(given).lines
        before = lines.served
        call: CompiledCall = plan(given)
        counts["of lines" if lines.served > before else "emitted"] += 1
        if lines.served > before:
            whole = plans._emitted(given, lines)
            place = lines._place(given.flat, None)
            assert place is not None
            line = next(one for one in reversed(lines._ranges) if one.parts(place) is not None)
            line.template.check(whole.sized, *place.along(line.groups))
            assert call.graph.fingerprint == whole.graph.fingerprint
        return call

    plans._plan = checked
    return counts


def gap(parallel: Any, model: nn.Module, inputs: dict[str, Any]) -> float:
    """Return the largest difference of the loss and of gradients."""
    losses = []
    for module in (parallel, model):
        module.zero_grad()
        result = module(**inputs)
        losses.append(result if isinstance(result, torch.Tensor) else result.loss)
        losses[-1].backward()
    gaps = [number((losses[0] - losses[1]).abs())]
    for name, parameter in model.named_parameters():
        gradient = parallel.get_parameter(name).grad
        gaps.append(number((gradient.full_tensor() - parameter.grad).abs().max()))
    return max(gaps)


def run(model: nn.Module, make: Callable[..., dict[str, Any]], sizes: list[Any], mesh: str, layout: str) -> Any:
    torch.manual_seed(0)
    parallel = autopar.parallelize(deepcopy(model), mesh, make(*sizes[0]), layout=layout)
    counts, gaps = compared(parallel), {}
    for size in sizes[1:]:
        gaps[size] = gap(parallel, model, make(*size))
    return max(gaps.values()), counts


def lengths() -> dict[str, Any]:
    model = gpt(**SMALL, batch=4, seq=64)[0].double()

    def make(batch: int, seq: int) -> dict[str, Any]:
        torch.manual_seed(batch * seq)
        return gpt(**SMALL, batch=batch, seq=seq)[1]  # type: ignore[no-any-return]

    sizes = [(4, seq) for seq in (16, 12, 17, 13, 24, 7, 1, 19, 31)]
    return {layout: run(model, make, sizes, "tp=2", layout) for layout in ("megatron", "megatron_sp")}


def batches() -> dict[str, Any]:
    """Number of samples and length vary freely."""
    model = gpt(**SMALL, batch=4, seq=64)[0].double()

    def make(batch: int, seq: int) -> dict[str, Any]:
        torch.manual_seed(batch * seq)
        return gpt(**SMALL, batch=batch, seq=seq)[1]  # type: ignore[no-any-return]

    sizes = [(4, 16), (6, 12), (8, 20), (10, 13), (12, 15), (7, 19), (20, 40), (13, 33), (2, 30), (3, 22), (8, 7)]
    return {
        axis: run(model, make, sizes, f"{axis}=2", layout) for axis, layout in (("dp", "zero1"), ("tp", "megatron"))
    }


def branches() -> dict[str, Any]:
    torch.manual_seed(1)
    model = Branching().double()
    sizes = [(4, seq) for seq in (12, 16, 18, 19, 20, 21, 22, 30, 26, 37, 14)]
    return {"ddp": run(model, lambda b, s: {"x": torch.randn(b, s, 4).double()}, sizes, "dp=2", "ddp")}


def images() -> dict[str, Any]:
    torch.manual_seed(1)
    sizes = [(4, 16), (4, 24), (4, 32), (4, 33), (4, 40), (4, 25)]
    return {"ddp": run(Images().double(), lambda b, s: {"x": torch.randn(b, 3, s, s).double()}, sizes, "dp=2", "ddp")}


def forgetful() -> tuple[float, int]:
    """One rank forgets its calls between two lengths."""
    model = gpt(**SMALL, batch=4, seq=64)[0].double()
    parallel = autopar.parallelize(deepcopy(model), "dp=2", gpt(**SMALL, batch=4, seq=16)[1], layout="ddp")
    gaps = []
    for seq in (12, 14, 15, 17):
        if torch.distributed.get_rank() == 1 and seq in (14, 17):
            parallel._plans.forget()
        gaps.append(gap(parallel, model, gpt(**SMALL, batch=4, seq=seq)[1]))
    return max(gaps), parallel._plans.kept.emitted


def test_calls_of_a_line_equal_emitted_ones() -> None:
    for one in launch(in_turn, (lengths, ()), (batches, ()), (branches, ()), (images, ()), (forgetful, ()), ranks=2):
        for worst, counts in (*one["lengths"].values(), *one["branches"].values(), *one["images"].values()):
            assert worst < 1e-12
            assert counts["of lines"] > 0
        assert all(worst < 1e-12 for worst, _ in one["batches"].values())
        # Odd numbers of samples are split unevenly, so they are ranges of their own.
        assert one["batches"]["dp"][1] == {"of lines": 4, "emitted": 6}
        assert one["batches"]["tp"][1] == {"of lines": 6, "emitted": 4}
        assert one["lengths"]["megatron"][1] == {"of lines": 4, "emitted": 4}
        assert one["forgetful"][0] < 1e-12


# -- models of transformers --------------------------------------------------------------------------------------------


def published(name: str) -> tuple[nn.Module, Callable[..., dict[str, Any]]]:
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    if name == "llama":
        config = transformers.LlamaConfig(
            **small, intermediate_size=32, num_key_value_heads=2, bos_token_id=1, eos_token_id=None, pad_token_id=0
        )
        model = transformers.LlamaForCausalLM(config)
    elif name == "gpt2":
        config = transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=4, n_positions=48)
        for rate in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
            setattr(config, rate, 0.0)
        model = transformers.GPT2LMHeadModel(config)
    elif name == "bert":
        rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        model = transformers.BertForMaskedLM(transformers.BertConfig(**small, intermediate_size=32, **rates))
    else:
        config = transformers.T5Config(
            vocab_size=32, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, dropout_rate=0.0,
            decoder_start_token_id=0,
        )  # fmt: skip
        model = transformers.T5ForConditionalGeneration(config)

    def make(batch: int, seq: int) -> dict[str, Any]:
        torch.manual_seed(batch * seq)
        ids = torch.randint(1, 32, (batch, seq))
        mask = torch.ones_like(ids)
        mask[0, seq // 2 + 1 :] = 0
        return {"input_ids": ids, "attention_mask": mask, "labels": ids if name != "t5" else ids[:, :1].repeat(1, 7)}

    return model.double(), make


def trained(name: str, mesh: str, layout: str) -> Any:
    model, make = published(name)
    # The positions of the GPT-2 end at 48; the batch grows at last.
    sizes = [(4, 16), (4, 12), (4, 18), (4, 13), (4, 23), (4, 7), (4, 40), (4, 1), (2, 12), (6, 12), (8, 12), (10, 12)]
    # One token has no next one: the loss of a causal model is a mean of nothing.
    kept = [size for size in sizes if size != (4, 1) or name in ("bert", "t5")]
    return run(model, make, kept, mesh, layout)


def translated(mesh: str, layout: str) -> Any:
    """Number of samples, length of the source and of the target vary freely."""
    model, _ = published("t5")

    def make(batch: int, source: int, target: int) -> dict[str, Any]:
        torch.manual_seed(batch * source + target)
        ids, labels = torch.randint(1, 32, (batch, source)), torch.randint(1, 32, (batch, target))
        mask = torch.ones_like(ids)
        mask[0, source // 2 + 1 :] = 0
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    draw = random.Random(0)
    sizes = [(2 * draw.randint(2, 6), draw.randint(9, 30), draw.randint(6, 20)) for _ in range(16)]
    return run(model, make, sizes, mesh, layout)


def generated() -> dict[str, Any]:
    model = published("llama")[0].eval()
    found = {}
    for cached in (True, False):
        parallel = autopar.parallelize(
            deepcopy(model), "tp=2", {"input_ids": torch.ones(2, 7).long()}, layout="megatron"
        )
        parallel.eval()
        torch.manual_seed(0)
        ids = torch.randint(1, 32, (2, 7))
        with torch.no_grad():
            wanted, own = (
                each.generate(ids, max_new_tokens=20, do_sample=False, use_cache=cached) for each in (model, parallel)
            )
        found[cached] = torch.equal(wanted, own), parallel._plans.kept.emitted
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5"])
@pytest.mark.parametrize(("mesh", "layout"), [("dp=2", "zero1"), ("tp=2", "megatron"), ("fsdp=2", "fsdp")])
def test_published_models_at_many_sizes(name: str, mesh: str, layout: str) -> None:
    for worst, counts in launch(trained, name, mesh, layout, ranks=2):
        # transformers computes losses in float32.
        assert worst < 1e-5
        assert counts["of lines"] >= 3, counts


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "layout"), [("dp=2", "zero1"), ("tp=2", "megatron")])
def test_sizes_of_a_translator_vary_freely(mesh: str, layout: str) -> None:
    for worst, counts in launch(translated, mesh, layout, ranks=2):
        assert worst < 1e-5
        assert counts == {"of lines": 9, "emitted": 6}


@pytest.mark.slow
def test_growing_sequences_generate_the_same_tokens() -> None:
    for one in launch(generated, ranks=2):
        for same, emitted in one.values():
            assert same
            assert emitted < 14
