"""Models of transformers with a split sequence: Llama, GPT-2, and Gemma-2 with sliding windows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from tests.runtime.launcher import launch
from tests.runtime.test_folded_sequence import Pairs, difference

transformers = pytest.importorskip("transformers")

VOCAB, ROWS = 40, 32
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "use_cache": False}
GROUPED = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2}


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED))


def gpt2() -> nn.Module:
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "use_cache": False}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **rates))


def gemma2(softcap: float | None = None) -> nn.Module:
    """One layer with a window of 8 tokens, one without; a soft cap is written out in place of fused attention."""
    kinds = {"head_dim": 8, "sliding_window": 8, "attn_logit_softcapping": softcap}
    model = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**GROUPED, **kinds))
    if softcap is None:
        model.config._attn_implementation = "sdpa"  # the constructor takes no word for it
    return model


def gemma2_capped() -> nn.Module:
    return gemma2(50.0)


# By model, layouts; the models compute some values in float32.
CASES: dict[Callable[[], nn.Module], tuple[float, tuple[str, ...]]] = {
    llama: (1e-6, ("fold seq; seq -> cp; * -> none", "seq -> cp; * -> none")),
    gpt2: (1e-10, ("fold seq; seq -> cp; * -> none", "fold seq 8; seq -> cp; * -> none")),
    gemma2: (1e-6, ("fold seq; seq -> cp; * -> none", "fold seq 8; seq -> cp; * -> none")),
    gemma2_capped: (1e-6, ("seq -> cp; * -> none",)),
}


def steps(number: int) -> list[tuple[float, float]]:
    """The largest difference from one process under each layout, and the pairs of this rank."""
    make, (_, layouts) = [*CASES.items()][number]
    torch.manual_seed(0)
    model = make().double()
    ids = torch.randint(0, VOCAB, (2, ROWS))
    given = {"input_ids": ids, "labels": ids}
    expected = model(**given)
    expected.loss.backward()
    found = []
    for layout in layouts:
        parallel: Any = autopar.parallelize(copy.deepcopy(model), "cp=4", given, layout=layout)
        with Pairs() as pairs:
            result = parallel(**given)
        result.loss.backward()
        apart = [difference(expected.loss, result.loss), difference(expected.logits, result.logits)]
        for name, one in model.named_parameters():
            apart.append(difference(one.grad, parallel.get_parameter(name).grad))
        found.append((max(apart), pairs.count))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(CASES)), ids=[make.__name__ for make in CASES])
def test_a_split_sequence(number: int) -> None:
    tolerance, layouts = [*CASES.values()][number]
    ranks = launch(steps, number, ranks=4)
    for place, layout in enumerate(layouts):
        assert max(rank[place][0] for rank in ranks) < tolerance, layout
        pairs = [rank[place][1] for rank in ranks]
        # The first rows of a window see less than all others, which is much of a short sequence.
        if layout.startswith("fold") and "gemma" not in [*CASES][number].__name__:
            assert max(pairs) <= 1.02 * sum(pairs) / len(pairs), (layout, pairs)


def loss_alone() -> float:
    """The difference from one process where the step returns its loss alone."""
    torch.manual_seed(0)
    model = llama().double()
    ids = torch.randint(0, VOCAB, (2, ROWS))
    given = {"input_ids": ids, "labels": ids}
    expected = model(**given)
    expected.loss.backward()
    layout = "fold seq; seq -> cp; * -> none"
    parallel: Any = autopar.parallelize(copy.deepcopy(model), "cp=2", given, layout=layout, outputs="loss")
    result = parallel(**given)
    assert result.logits is None
    result.loss.backward()
    gradients = (difference(one.grad, parallel.get_parameter(name).grad) for name, one in model.named_parameters())
    return max(difference(expected.loss, result.loss), *gradients)


def test_dropped_results_are_not_brought_back() -> None:
    model = llama()
    ids = torch.randint(0, VOCAB, (2, ROWS))
    given = {"input_ids": ids, "labels": ids}
    found, plans = {}, {}
    for outputs in ("sharded", "loss"):
        plans[outputs] = autopar.plan(
            *(model, "cp=2", given),
            layout="fold seq; seq -> cp; * -> none",
            cluster="h100",
            cache=False,
            outputs=outputs,
        )
        found[outputs] = [str(one) for one in plans[outputs].collectives if "lm_head/unfold" in str(one)]
    # The logits and their gradient.
    assert [len(one) for one in found.values()] == [2, 0]
    assert len(plans["sharded"].collectives) - 2 == len(plans["loss"].collectives)
    assert plans["loss"].step_seconds < plans["sharded"].step_seconds
    assert autopar.Plan.read(plans["loss"].text, autopar.trace(model, given)).text == plans["loss"].text
    # A collective whose result nothing reads is an error there.
    assert max(launch(loss_alone, ranks=2)) < 1e-6
