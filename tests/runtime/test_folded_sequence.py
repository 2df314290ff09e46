"""A folded sequence on real ranks: what one process gets, each rank with as much of the attention as the others."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
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


def step(mesh: str, layout: str, dtype: torch.dtype = torch.float64, **options: Any) -> Mapping[str, float]:
    """The differences from one process, and the pairs of this rank."""
    torch.manual_seed(0)
    model = Model().to(dtype)
    given = inputs()
    parallel = autopar.parallelize(copy.deepcopy(model), mesh, given, layout=layout, **options)
    loss, logits = model(**given)
    loss.backward()
    with Pairs() as pairs:
        found = parallel(**given)
    found[0].backward()
    gradients = (difference(one.grad, parallel.get_parameter(name).grad) for name, one in model.named_parameters())
    apart = {"loss": difference(loss, found[0]), "logits": difference(logits, found[1]), "gradients": max(gradients)}
    with torch.no_grad():
        apart["without grad"] = difference(loss, parallel(**given)[0])
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


class Trunk(Model):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(ids, labels)[1]


def compiled() -> float:
    """Returns the largest difference of results and gradients."""
    torch.manual_seed(0)
    model, given = Trunk().double(), inputs()
    parallel = autopar.parallelize(copy.deepcopy(model), "cp=2", given, layout=LAYOUTS["cp=2"][0], outputs="full")
    call: Any = torch.compile(parallel, backend="aot_eager")
    found, expected = call(**given), model(**given)
    for result in (found, expected):
        result.square().sum().backward()
    gradients = (difference(one.grad, parallel.get_parameter(name).grad) for name, one in model.named_parameters())
    return max(difference(expected, found), *gradients)


@pytest.mark.slow
def test_compiled() -> None:
    assert max(launch(compiled, ranks=2)) < 1e-13


# -- other ways to run it ----------------------------------------------------------------------------------------------


def other_ways() -> list[Mapping[str, float]]:
    heads = """
        fold seq
        seq -> cp
        * -> none
        act[heads] { (heads, kv_heads) -> cp; seq -> none }
        act[kv_heads] { kv_heads -> cp; seq -> none }
    """
    return [
        # Attention over all rows, of some of the heads.
        step("cp=2", heads),
        step("cp=2", "fold seq 4; seq -> cp; * -> none", outputs="full"),
    ]


@pytest.mark.slow
def test_other_ways_to_run() -> None:
    for found in zip(*launch(other_ways, ranks=2), strict=True):
        check([*found])


def uneven() -> Mapping[str, float]:
    # Pieces of 8 positions over three ranks: 3, 3 and 2.
    return step(
        "cp=3", "fold seq 4; seq -> cp pad; param { * -> none }; input { * -> none }; * -> none", outputs="full"
    )


@pytest.mark.slow
def test_uneven_shards() -> None:
    for found in launch(uneven, ranks=3):
        assert max(found[name] for name in found if name != "pairs") < 2e-15, found


def half() -> Mapping[str, float]:
    return step("cp=2", LAYOUTS["cp=2"][0], dtype=torch.bfloat16)


@pytest.mark.slow
def test_half_precision() -> None:
    check(launch(half, ranks=2), 0.1)


def local_and_saved(folder: str) -> Mapping[str, float]:
    """Each rank gives its part of the ids, under a plan that was saved."""
    torch.manual_seed(0)
    model, given = Model().double(), inputs()
    plan = autopar.plan(
        model, "cp=2", given, layout="fold seq; seq -> cp; * -> none", cluster="h100", cache=False, local_inputs=True
    )
    path = f"{folder}/{torch.distributed.get_rank()}.lay"
    plan.save(path)
    assert autopar.Plan.load(path, model, given).text == plan.text
    parallel = autopar.parallelize(copy.deepcopy(model), "cp=2", layout=plan, local_inputs=True)
    rank = torch.distributed.get_rank()
    split = {name: "seq" in str(plan.layout_of(name)) or any(plan.layout_of(name).splits) for name in given}
    own = {name: x.chunk(2, 1)[rank] if split[name] else x for name, x in given.items()}
    found = parallel(**own)
    found[0].backward()
    loss, logits = model(**given)
    loss.backward()
    gradients = (difference(one.grad, parallel.get_parameter(name).grad) for name, one in model.named_parameters())
    return {"loss": difference(loss, found[0]), "logits": difference(logits, found[1]), "gradients": max(gradients)}


@pytest.mark.slow
def test_local_inputs_of_a_saved_plan(tmp_path: Path) -> None:
    for found in launch(local_and_saved, str(tmp_path), ranks=2):
        assert max(found.values()) < 2e-15, found
