"""A folded sequence on real ranks: what one process gets, each rank with as much of the attention as the others."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar.rules.shard_call import folded
from tests.runtime.launcher import launch

ROWS, VOCAB = 32, 40


class Block(nn.Module):
    """Grouped causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(32, 32)
        self.kv = nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        q, (k, v) = self.q(x), self.kv(x).chunk(2, -1)
        q, k, v = (y.unflatten(-1, (-1, 8)).transpose(1, 2) for y in (q, k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.norm(x + mixed.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Blocks between a table of positions and a loss on the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, 32)
        self.positions = nn.Embedding(ROWS, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(32, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        following = functional.pad(labels, (0, 1), value=-100)[:, 1:]
        return functional.cross_entropy(logits.flatten(0, 1), following.flatten()), logits


class Pairs:
    """Counts the queries times the keys that attention works on, of causal squares the lower half."""

    def __init__(self) -> None:
        self.count = 0.0

    def __enter__(self) -> Pairs:
        self.kept = dict(folded.FORWARD)

        def counted(kernel: Any) -> Any:
            def run(rows: Tensor, keys: Tensor, values: Tensor, part: Any, scale: float) -> Any:
                number, seen = rows.shape[-2], keys.shape[-2]
                self.count += number * (seen - number) + number * (number + 1) / 2 if part.causal else number * seen
                return kernel(rows, keys, values, part, scale)

            return run

        folded.FORWARD.update({name: counted(kernel) for name, kernel in self.kept.items()})
        return self

    def __exit__(self, *error: object) -> None:
        folded.FORWARD.update(self.kept)


def inputs(rows: int = ROWS) -> dict[str, Tensor]:
    ids = torch.randint(0, VOCAB, (2, rows), generator=torch.Generator().manual_seed(3))
    return {"ids": ids, "labels": ids.clone()}


def difference(one: Tensor, other: Any) -> float:
    other = other.full_tensor() if hasattr(other, "full_tensor") else other
    return float((one - other).detach().abs().max())


def step(
    mesh: str, layout: str, dtype: torch.dtype = torch.float64, backend: str | None = None, **options: Any
) -> Mapping[str, float]:
    """The differences from one process, and the pairs of this rank."""
    torch.manual_seed(0)
    model = Model().to(dtype)
    given = inputs()
    parallel = autopar.parallelize(copy.deepcopy(model), mesh, given, layout=layout, **options)
    call: Any = torch.compile(parallel, backend=backend) if backend else parallel
    loss, logits = model(**given)
    loss.backward()
    with Pairs() as pairs:
        found = call(**given)
    found[0].backward()
    gradients = (difference(one.grad, parallel.get_parameter(name).grad) for name, one in model.named_parameters())
    apart = {"loss": difference(loss, found[0]), "logits": difference(logits, found[1]), "gradients": max(gradients)}
    with torch.no_grad():
        apart["without grad"] = difference(loss, call(**given)[0])
    return {**apart, "pairs": pairs.count}


LAYOUTS = {
    "cp=2": ("fold seq; seq -> cp; * -> none", "fold seq 4; seq -> cp; recompute full @blocks.*; * -> none"),
    "cp=4": ("fold seq; seq -> cp; * -> none", "micro 2; fold seq 4; seq -> cp; * -> none"),
    "dp=2,cp=2": (
        "fold seq; batch -> dp; seq -> cp; * -> none",
        "fold seq; seq -> dp*cp; param { * -> none, d_model -> dp*cp }",
    ),
}


def steps(mesh: str) -> list[Mapping[str, float]]:
    return [step(mesh, layout) for layout in LAYOUTS[mesh]]


def check(found: list[Mapping[str, float]], tolerance: float = 2e-15) -> None:
    assert max(one[name] for one in found for name in one if name != "pairs") < tolerance, found
    pairs = [one["pairs"] for one in found]
    assert max(pairs) == min(pairs) > 0, pairs


@pytest.mark.parametrize(
    "mesh", ["cp=2", *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in LAYOUTS if mesh != "cp=2")]
)
def test_one_step(mesh: str) -> None:
    found = launch(steps, mesh, ranks={"cp=2": 2}.get(mesh, 4))
    for layout in range(len(LAYOUTS[mesh])):
        check([rank[layout] for rank in found])
