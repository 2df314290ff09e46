"""Mixtures of transformers with their experts on different ranks, against one process: Gloo, float64."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.runtime.routed_load import RoutedLoad
from tests.runtime.launcher import launch
from tests.runtime.sent import Counted
from tests.runtime.training import gradients, worst

moe = pytest.importorskip("transformers.integrations.moe")
import transformers  # noqa: E402  # after the skip

EXPERTS, EACH, WIDTH = 8, 2, 24
SIZES = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 32, "use_cache": False}
CONFIGS: dict[str, dict[str, Any]] = {
    "Mixtral": {"intermediate_size": 40, "num_key_value_heads": 2, "num_local_experts": EXPERTS},
    "Qwen3Moe": {"moe_intermediate_size": 40, "num_key_value_heads": 2, "head_dim": 8, "num_experts": EXPERTS},
    "DeepseekV3": {"moe_intermediate_size": 40, "n_routed_experts": EXPERTS, "n_group": 2, "topk_group": 1}
    | {"num_key_value_heads": 4, "first_k_dense_replace": 0, "n_shared_experts": 1, "q_lora_rank": 16}
    | {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8},
    "GptOss": {"intermediate_size": 40, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": EXPERTS}
    | {"layer_types": ["full_attention"]},
}
# Routers of two of them work in float32 whatever the dtype of the model.
EXACT = {"Mixtral": 1e-6, "Qwen3Moe": 1e-6, "DeepseekV3": 1e-6, "GptOss": 1e-9}


class Block(nn.Module):
    """The experts of one layer, with the router; the bias of its input sends tokens where the test wants them."""

    def __init__(self, name: str) -> None:
        super().__init__()
        config = getattr(transformers, f"{name}Config")(num_experts_per_tok=EACH, **SIZES, **CONFIGS[name])
        self.mlp = getattr(transformers, f"{name}Model")(config).layers[0].mlp

    def forward(self, x: Tensor) -> Tensor:
        found = self.mlp(x)
        return (found[0] if isinstance(found, tuple) else found).square().sum()


def block(name: str, routing: str) -> tuple[nn.Module, Tensor]:
    """A block in float64 and its tokens; expert 1 gets no rows, with `one` all tokens go to the experts 6 and 7."""
    moe._can_use_grouped_mm = lambda *given, **more: False  # it refuses float64
    torch.manual_seed(0)
    model = Block(name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
        router = next(
            value for key, value in model.named_parameters() if key.endswith(("gate.weight", "router.weight"))
        )
        router[1] = -9 * router[1].abs()
        if routing == "one":
            router[6:] = 9 * router[6:].abs()
    return model.double(), torch.randn(8, 6, WIDTH, dtype=torch.float64).abs()


class Products(TorchDispatchMode):
    """FLOPs of the products by group, the rows that are multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.autopar.multiply_groups.default:
            self.flops += 2 * args[0].shape[0] * args[1].shape[1] * args[1].shape[2]
        return func(*args, **(kwargs or {}))


class Seen(NamedTuple):
    """One step of one rank."""

    name: str
    loss_gap: float
    gradient_gap: float
    forward: Counter[str]
    backward: Counter[str]
    flops: int
    loads: tuple[RoutedLoad, ...]


def step(name: str, mesh: str, layout: str, routing: str) -> Seen:
    """The differences of loss and gradients, collectives forward and backward, and the FLOPs of this rank."""
    model, x = block(name, routing)
    x.requires_grad_()
    parallel = autopar.parallelize(model, mesh, (x,), layout=layout)
    loss = model(x)
    loss.backward()
    with Counted() as forward, Products() as products:
        mine = parallel(x)
    with Counted() as backward:
        mine.backward()
    loads = parallel.routed_loads()
    apart = float((mine.detach() - loss.detach()).abs() / loss.detach().abs())
    gradient_gap = worst(gradients(parallel), gradients(model))
    return Seen(name, apart, gradient_gap, forward.counts, backward.counts, products.flops, loads)


def steps(mesh: str, layout: str, routing: str) -> list[Seen]:
    """The steps of all models in one launch."""
    return [step(name, mesh, layout, routing) for name in CONFIGS]


DISPATCH = "batch -> {tokens}\n@*experts* {{ expert -> ep }}"
WAYS = {
    "ep=2": DISPATCH.format(tokens="ep"),
    "ep=4": DISPATCH.format(tokens="ep"),
    "dp=2,ep=2": DISPATCH.format(tokens="dp*ep"),
    "select": "@*experts* { expert -> ep }",
}


ROWS = 8 * 6 * EACH
ROW_FLOPS = 2 * WIDTH * (80 + 40)


def check(found: Sequence[Seen], selects: bool) -> None:
    for one in found:
        assert one.loss_gap < 1e-9, one
        assert one.gradient_gap < EXACT[one.name], one
        # Of rows two forward and two backward, of counts one.
        assert one.forward["all_to_all_single"] == (0 if selects else 3), one
        assert one.backward["all_to_all_single"] == (0 if selects else 2), one
        assert one.forward["all_gather_into_tensor"] == 0, one
        (load,) = one.loads
        assert load.rows == tuple(other.flops // ROW_FLOPS for other in found), "rows that were multiplied"
        assert load.imbalance == max(load.rows) * len(found) / ROWS
    assert sum(one.flops for one in found) == ROWS * ROW_FLOPS, "each row is multiplied on one rank, none masked"


def test_rows_go_to_their_experts() -> None:
    found = launch(step, "GptOss", "ep=2", WAYS["ep=2"], "uneven", ranks=2)
    check(found, selects=False)


@pytest.mark.slow
@pytest.mark.parametrize("routing", ["uneven", "one"])
@pytest.mark.parametrize("way", WAYS)
def test_experts_of_transformers(way: str, routing: str) -> None:
    ranks, mesh = (4, "ep=4") if way == "select" else (2 if way == "ep=2" else 4, way)
    for found in zip(*launch(steps, mesh, WAYS[way], routing, ranks=ranks), strict=True):
        check(found, selects=way == "select")
        # All rows go to experts 6 and 7, which are on one rank of `ep`; other ranks of `dp` have other tokens.
        busy = 1 if "dp" not in way else 2
        assert routing == "uneven" or found[0].loads[0].imbalance == ranks / busy


def staged_loads(layout: str) -> list[tuple[str, tuple[int, ...]]]:
    """The loads of a Mixtral of two layers in two stages."""
    moe._can_use_grouped_mm = lambda *given, **more: False
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**{**SIZES, "num_hidden_layers": 2}, **CONFIGS["Mixtral"])
    ids = torch.randint(32, (8, 6))
    model = transformers.MixtralForCausalLM(config).double()
    given = {"input_ids": ids, "labels": ids}
    parallel = autopar.parallelize(model, "pp=2,ep=2", given, layout=layout, outputs="loss")
    before = parallel.routed_loads()
    assert before == (), before
    parallel(**given).loss.backward()
    return [(one.op, one.rows) for one in parallel.routed_loads()]


@pytest.mark.slow
def test_loads_of_stages_and_micro_batches() -> None:
    """Each stage has its own layers; of two micro-batches of 4 sequences the last one counts."""
    found = launch(staged_loads, f"micro 2; pipeline pp 1f1b; {WAYS['ep=2']}", ranks=4)
    assert found == [found[0]] * 4
    assert [name for name, _ in found[0]] == [f"model.layers.{i}.mlp.experts/grouped" for i in range(2)]
    for _, rows in found[0]:
        assert len(rows) == 2, "of the ranks of one stage"
        assert sum(rows) == 4 * 6 * EACH
