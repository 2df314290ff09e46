"""The limits on halos and memory, on layouts that are decided and not run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.cost.lowered_step import LoweredStep
from autopar.cost.memory.peak import check_memory, memory
from autopar.errors import LayoutError
from autopar.sharding.contracts import check_contracts
from autopar.sharding.layout.language import choose_layout, parse_layout
from autopar.sharding.propagation import propagate
from autopar.sharding.reshard_insertion import inserted_reshards
from autopar.sharding.time_slice import propagate_plan
from examples.hf import hf
from tests.traced import traced


def answer(layer: nn.Module, limit: str, ranks: int) -> str:
    graph = autopar.trace(layer, (torch.randn(2, 3, 16, 8),), dims={"input": "batch channels height width"})
    layout = parse_layout(f"height -> sy; * -> none\nlimit halo {limit}", "my.lay")
    assignment = propagate(graph, layout, {"sy": ranks})
    assert assignment.ops["/conv2d" if isinstance(layer, nn.Conv2d) else "/max_pool2d"].choice.axes == ("sy",)
    try:
        check_contracts(layout, graph, assignment, ())
    except LayoutError as error:
        return str(error)
    return "fine"


@pytest.mark.parametrize(
    ("layer", "ranks", "share"),
    [
        (nn.Conv2d(3, 4, 3, padding=1), 2, 12.5),  # 8 rows each, and one from the only neighbour
        (nn.Conv2d(3, 4, 3, padding=1), 4, 50),  # 4 rows each, and one from either side
        (nn.Conv2d(3, 4, 5, padding=2), 4, 100),
        (nn.Conv2d(3, 4, 3, padding=1, stride=2), 4, 25),  # only the rows above are read
        (nn.Conv2d(3, 4, 3, padding=2, dilation=2), 2, 25),
    ],
)
def test_the_share_that_neighbours_send(layer: nn.Module, ranks: int, share: float) -> None:
    assert answer(layer, f"{share:g}%", ranks) == "fine"
    assert answer(layer, f"{share - 0.5:g}%", ranks).startswith("E6: /conv2d split by ")


def test_the_message() -> None:
    assert answer(nn.Conv2d(3, 4, 3, padding=1), "25%", 4) == (
        "E6: /conv2d split by a gets 50% of a shard's extent from its neighbours, more than 25%\n"
        "  my.lay:2 | limit halo 25%\n"
        "           | ^\n"
        "fix: split this op over fewer ranks, or by another dim"
    )


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)) for _ in range(4)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


def memory_answer(limit: str, lines: str = "", device_bytes: float | None = None) -> tuple[str, float]:
    graph = autopar.trace(Stack(), (torch.randn(512, 64),), dims={"x": "batch features"})
    layout = parse_layout(f"batch -> dp; * -> none\nlimit memory {limit}\n{lines}", "my.lay")
    plan = propagate_plan(graph, layout, {"dp": 2})
    peak = memory(LoweredStep(graph, plan)).peak_bytes
    try:
        check_memory(layout, graph, plan, device_bytes)
    except LayoutError as error:
        return str(error), peak
    return "fine", peak


def test_the_limit_on_memory() -> None:
    _, peak = memory_answer("1GiB")
    assert memory_answer(f"{int(peak)}B")[0] == "fine"
    broken, _ = memory_answer(f"{int(peak) - 1}B")
    assert broken.startswith("E6: out of memory: expected at most ")
    assert f" on a device, got {peak / 2**20:.2f} MiB in " in broken
    assert "the states of adamw 1.01 MiB" in broken
    assert "\n  my.lay:2 | limit memory " in broken
    again_answer, less = memory_answer(f"{int(peak) - 1}B", "recompute full @blocks.*")
    assert less < peak
    assert again_answer == "fine"
    assert memory_answer(f"1GiB\nlimit memory {int(peak) - 1}B")[0].startswith("E6"), "the lowest counts"


def test_a_share_of_a_device() -> None:
    _, peak = memory_answer("1GiB")
    assert memory_answer("50%", device_bytes=2 * peak)[0] == "fine"
    assert memory_answer("49%", device_bytes=2 * peak)[0].startswith("E6: out of memory: ")
    assert memory_answer("90%")[0] == (
        "E6: unknown memory of a device in 'limit memory 90%': expected a size in bytes\n"
        "  my.lay:2 | limit memory 90%\n"
        "           | ^\n"
        "fix: write a size, as in 'limit memory 70GiB'"
    )


class Pairs(nn.Module):
    """A loss over all pairs of samples, which no rank has by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.tower(x)
        return nn.functional.cross_entropy(z @ z.T, torch.arange(len(x)))


def test_fsdp_says_what_it_gathers_of_activations() -> None:
    graph = autopar.trace(Pairs(), (torch.randn(4, 12),))
    layout = choose_layout("fsdp", {"fsdp": 2})
    assignment = propagate(graph, layout, {"fsdp": 2})
    with pytest.warns(autopar.AutoparWarning, match="warn all_gather over fsdp is broken by the all_gather"):
        check_contracts(layout, graph, assignment, inserted_reshards(graph, assignment, "sharded"))


SPLIT = {
    "deepseek_v3": ("model.layers.0.self_attn.q_b_proj.weight", "heads"),
    "falcon": ("transformer.h.0.mlp.dense_h_to_4h.weight", "d_ff"),
    "mobilebert": ("mobilebert.encoder.layer.0.attention.self.query.weight", "heads"),
    "albert": ("albert.embeddings.word_embeddings.weight", "vocab"),
}


@pytest.mark.parametrize("strategy", ["megatron", "megatron_sp", "fsdp_tp"])
@pytest.mark.parametrize("architecture", SPLIT)
def test_no_two_dims_of_a_weight_claim_the_axis_of_a_strategy(architecture: str, strategy: str) -> None:
    """Beside a low-rank dim, one head of keys, and the dim of a narrow table there is what is split."""
    graph = traced(hf, architecture)
    assignment = propagate(graph, choose_layout(strategy, {"tp": 2}), {"tp": 2})
    name, dim = SPLIT[architecture]
    (place,) = (i for i, atom in enumerate(graph.tensors[name].atoms) if dim in atom.names)
    assert assignment.stored[name].splits[place] == ("tp",)
