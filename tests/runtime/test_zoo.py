"""Whole architectures under strategies, on real processes: a fast subset of `python -m benchmarks.zoo`."""

from __future__ import annotations

from collections import Counter
from math import inf, isnan

import pytest
import torch

import autopar
from autopar.cli.verify_processes import differences, results_of
from autopar.errors import LayoutError
from autopar.sharding.contracts import check_contracts
from autopar.sharding.layout.language import choose_layout, load_strategy, parse_layout
from autopar.sharding.propagation import propagate
from autopar.sharding.reshard_insertion import inserted_reshards
from benchmarks.architectures import STANDARD
from benchmarks.zoo import (
    STRATEGIES,
    is_right,
    model_parts,
    strategy_call,
    zoo_model,
    zoo_outcomes,
)
from tests.runtime.launcher import launch

pytest.importorskip("transformers")

FAST = ("llama",)
WITHOUT_MODEL_DIMS = ("resnet",)
LAYERS = 2

Counts = dict[tuple[str, str], int]


def check(architecture: str, sizes: tuple[int, ...], train: bool = False, dropout: float = 0.0) -> None:
    for outcome in zoo_outcomes(architecture, STRATEGIES, sizes, train, dropout=dropout):
        if outcome.where == "no dims":
            assert architecture in WITHOUT_MODEL_DIMS
            continue
        assert is_right(architecture, outcome), f"{outcome.strategy}: {outcome.error} {outcome.where}"
        assert outcome.error is None or outcome.collectives > 0, f"{outcome.strategy}: nothing was split"


@pytest.mark.parametrize("architecture", FAST)
def test_outputs_and_gradients_are_those_of_one_process(architecture: str) -> None:
    check(architecture, (2,))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [name for name in STANDARD if name not in FAST])
def test_every_architecture(architecture: str) -> None:
    check(architecture, (2,))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "bart", "swin"])
def test_two_axes(architecture: str) -> None:
    check(architecture, (2, 2))


@pytest.mark.slow
def test_four_parts_of_the_model() -> None:
    check("mistral", (4,))


@pytest.mark.slow
def test_eight_ranks_on_three_axes() -> None:
    strategies = ("fsdp_tp", "megatron_sp")
    outcomes = zoo_outcomes("gpt2", strategies, (2, 2, 2), seconds=1200)
    assert [outcome.strategy for outcome in outcomes] == list(strategies)
    for outcome in outcomes:
        assert is_right("gpt2", outcome), f"{outcome.strategy}: {outcome.error} {outcome.where}"


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["gpt2", "vit", "resnet"])
def test_train_mode_without_dropout(architecture: str) -> None:
    check(architecture, (2,), train=True)


def test_axes_of_the_strategies() -> None:
    assert [strategy_call(name, 3) for name in STRATEGIES] == [
        "ddp(dp=a*b*c)",
        "fsdp(fsdp=a*b*c)",
        "megatron(dp=a*b,tp=c)",
        "megatron_sp(dp=a*b,tp=c)",
        "fsdp_tp(fsdp=a*b,tp=c)",
    ]
    assert [strategy_call(name, 1) for name in STRATEGIES] == [
        *("ddp(dp=a)", "fsdp(fsdp=a)", "megatron(tp=a)", "megatron_sp(tp=a)", "fsdp_tp(tp=a)")
    ]
    assert model_parts("megatron_sp", (4,)) == 4
    assert model_parts("megatron_sp", (2, 2, 2)) == 2
    assert model_parts("ddp", (2, 2)) == 1
    config = zoo_model("llama", train=False, parts=4)[0].config
    assert (config.num_key_value_heads, config.num_attention_heads) == (4, 8)


@pytest.mark.parametrize("architecture", ["mistral", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_strategies_keep_their_promises(architecture: str) -> None:
    """What each forbids is not sent for: no activation is gathered under fsdp, no stream reduced under megatron_sp."""
    model, inputs = zoo_model(architecture, train=False)
    graph = autopar.trace(model, inputs)
    for strategy in STRATEGIES:
        axes = {"a": 2, "b": 2}
        layout = choose_layout(strategy_call(strategy, 2), axes)
        assignment = propagate(graph, layout, axes)
        check_contracts(layout, graph, assignment, inserted_reshards(graph, assignment))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["gpt2", "bert", "t5", "swin"])
def test_dropout_drops_what_one_process_drops(architecture: str) -> None:
    check(architecture, (2,), train=True, dropout=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["bert", "gpt2"])
def test_dropout_over_two_axes(architecture: str) -> None:
    check(architecture, (2, 2), train=True, dropout=0.1)


def test_a_buffer_that_is_zero_but_for_rounding_is_not_judged_by_itself() -> None:
    """The mean of what was normalised; a mask among the buffers does not hide the others."""
    whole = {"buffer mean": torch.full((3,), 1e-17), "buffer var": torch.ones(3), "buffer mask": torch.tensor([1e30])}
    noise, *_ = differences(whole, {**whole, "buffer mean": torch.zeros(3)})
    assert noise.relative < 1e-12
    wrong, *_ = differences(whole, {**whole, "buffer mean": torch.full((3,), 1e-3)})
    assert (wrong.name, wrong.relative) == ("buffer mean", pytest.approx(1.0))


def test_a_wrong_gradient_is_seen() -> None:
    whole = {"output 0": torch.ones(3), "gradient of weight": torch.ones(2), "gradient of bias": torch.zeros(2)}
    assert {one.relative for one in differences(whole, dict(whole))} == {0}
    worst, *others = differences(whole, {**whole, "gradient of weight": torch.tensor([1.0, 1.5])})
    assert (worst.name, worst.relative) == ("gradient of weight", 0.5)
    assert {one.relative for one in others} == {0}
    missing, *_ = differences(whole, {**whole, "gradient of bias": None})
    assert (missing.name, missing.relative, missing.reason) == ("gradient of bias", inf, "one of the two is None")
    reshaped, *_ = differences(whole, {**whole, "output 0": torch.ones(4)})
    assert (reshaped.relative, reshaped.reason) == (inf, "shape [4], not [3]")
    extra, *_ = differences(whole, {**whole, "buffer mean": torch.ones(4)})
    assert (extra.relative, extra.reason) == (inf, "only the parallel model has it")
    nothing, *_ = differences(whole, {**whole, "output 0": torch.tensor([1.0, float("nan"), 1.0])})
    assert (nothing.name, isnan(nothing.relative)) == ("output 0", True)
    noise = torch.full((2,), 1e-12)
    assert differences(whole, {**whole, "gradient of bias": noise})[0].relative == pytest.approx(1e-9)


def count_collectives(strategy: str, mesh: str) -> tuple[Counts, int]:
    """The collectives of a Llama by direction and kind, and how many of its parameters are split."""
    model, inputs = zoo_model("llama", train=False)
    parallel = autopar.parallelize(model, mesh, inputs, layout=strategy)
    split = sum(bool(parallel.assignment.stored[tensor.name].axes) for tensor in parallel.graph.parameters)
    return dict(Counter((c.direction, c.kind) for c in parallel.collectives())), split


@pytest.mark.slow
def test_grouped_queries_under_megatron_send_what_megatron_sends() -> None:
    counts, _ = launch(count_collectives, "megatron", "tp=2", ranks=2)[0]
    assert counts == {
        ("forward", "all_reduce"): 2 * LAYERS + 1,  # two a layer, and the embedding's
        ("backward", "all_reduce"): 2 * LAYERS + 1,  # two a layer, and the head's
    }


def test_fsdp_gathers_each_split_parameter_once_and_scatters_its_gradient() -> None:
    counts, split = launch(count_collectives, "fsdp", "fsdp=2", ranks=2)[0]
    assert split == 3 + 9 * LAYERS  # embedding, last norm, head; seven linears and two norms a layer
    assert counts == {("forward", "all_gather"): split, ("backward", "reduce_scatter"): split}


def test_fewer_kv_heads_than_ranks_stay_whole_or_are_an_error_that_says_so() -> None:
    model, inputs = zoo_model("llama", train=False)
    graph = autopar.trace(model, inputs)
    stored = propagate(graph, load_strategy("megatron").on_axes({"dp": ()}), {"tp": 4}).stored
    splits = {name: stored[f"model.layers.0.{name}.weight"].splits for name in ("self_attn.q_proj", "mlp.up_proj")}
    assert not any(splits["self_attn.q_proj"])
    assert splits["mlp.up_proj"][0] == ("tp",)
    with pytest.raises(LayoutError) as raised:
        propagate(graph, parse_layout("(heads, kv_heads) -> tp; * -> none"), {"tp": 4})
    assert "E4: the dim 'heads' of model.layers.0.self_attn.q_proj.weight can take no alternative" in str(raised.value)
    assert "tp = 4 does not divide 2 x 2, its parts kv_heads x " in str(raised.value)


@pytest.mark.slow
def test_two_axes_on_one_dim_may_stand_in_any_order() -> None:
    worst, where = launch(compare_orders, ranks=4)[0]
    assert worst < 1e-12, where


def compare_orders() -> tuple[float, str]:
    """A vocabulary over two axes, in another order than the mesh's."""
    model, inputs = zoo_model("llama", train=False)
    parallel = autopar.parallelize(model, "a=2,b=2", inputs, layout="vocab -> b*a; * -> none", outputs="full")
    worst, *_ = differences(results_of(model, inputs), results_of(parallel, inputs))
    return worst.relative, worst.name
