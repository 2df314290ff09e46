"""Shares of the batch: their text, whole samples by speed, and what a mistake is told."""

from __future__ import annotations

from math import gcd

import pytest
from torch import nn

import autopar
from autopar.errors import LayoutError
from autopar.ir.graph import NamedGraph
from autopar.mesh import Shares, SubMesh
from autopar.sharding.layout.language import parse_layout, print_layout
from autopar.sharding.propagation import propagate
from autopar.sharding.sharding import Atoms, Sharding, atoms_of, chunk, longest, splits_evenly
from autopar.sharding.shares import by_numbers, greedy, marked
from examples.gpt import gpt
from examples.mlp import mlp


@pytest.fixture(scope="module")
def graph() -> NamedGraph:
    model, inputs = gpt(layers=1, d_model=32, heads=4, seq=8, vocab=32, batch=16, device="meta")
    return autopar.trace(model, inputs)


@pytest.mark.parametrize(
    ("samples", "speeds", "expected"),
    [
        (16, (12, 4), (12, 4)),
        (16, (1, 1), (8, 8)),
        (7, (2, 1), (5, 2)),
        (3, (1, 1), (2, 1)),
        (1, (1, 5), (0, 1)),
        (6, (2, 0, 1), (4, 0, 2)),
        (256, (990,) * 4 + (312,) * 4, (49, 49, 49, 49, 15, 15, 15, 15)),
        (64, (1,) * 63 + (2 / 3,), (1,) * 64),
    ],
)
def test_whole_samples_by_speed(samples: int, speeds: tuple[float, ...], expected: tuple[int, ...]) -> None:
    assert greedy(samples, speeds) == expected


@pytest.mark.parametrize("samples", [5, 64, 100, 1000])
def test_greedy_is_the_definition(samples: int) -> None:
    speeds = (2.85, 2.85, 1.0, 0.3, 1.7)
    counts = [0] * len(speeds)
    for _ in range(samples):
        counts[min(range(len(speeds)), key=lambda i: (counts[i] + 1) / speeds[i])] += 1
    assert greedy(samples, speeds) == tuple(counts)


def test_pieces_of_shares_fill_the_whole() -> None:
    weights = (5, 2, 1)
    pieces = [chunk(16, 3, i, weights) for i in range(3)]
    assert pieces == [(0, 10), (10, 4), (14, 2)]
    axes = SubMesh({"pod": 3, "dp": 2}, shares=Shares("batch", (("pod", weights),)))
    assert longest(16, ("pod", "dp"), axes, by_share=True) == 5
    assert longest(16, ("pod", "dp"), axes) == 3
    assert longest(16, ("pod",), axes.seen({"pod": 2}), by_share=True) == 2
    assert splits_evenly(16, ("pod", "dp"), axes, by_share=True)
    assert not splits_evenly(16, ("pod",), axes)
    assert not splits_evenly(8, ("pod", "dp"), axes, by_share=True)
    sharding = Sharding((("pod", "dp"), ()))
    atoms = Atoms((16, 6), (1, 1), (0,))
    found = [sharding.pieces(atoms, axes, {"pod": i, "dp": j})[0] for i in range(3) for j in range(2)]
    assert found == [(0, 5), (5, 5), (10, 2), (12, 2), (14, 1), (15, 1)]
    assert axes != SubMesh({"pod": 3, "dp": 2})
    assert axes.like({"dp": 2}).shares is None


def test_first_atoms_of_the_dim_are_marked(graph: NamedGraph) -> None:
    found = marked(graph, "batch")
    assert marked(found, "batch") is found
    assert marked(graph, "batch") is found
    assert found.fingerprint == graph.fingerprint
    for tensor in found.tensors.values():
        own = [i for i, atom in enumerate(tensor.atoms) if "batch" in atom.names]
        assert atoms_of(tensor).by_share == tuple(own[:1]), tensor.name
    logits = next(node for node in found.nodes if "cross_entropy" in node.op)
    assert logits.by_share == {("a", 0)}


@pytest.mark.parametrize(
    "text",
    [
        "batch -> pod by 12:4\n",
        "batch -> pod by 0:4\n",
        "batch -> pod by speed | none !1\n",
        "input { batch -> pod*dp by 3:1, seq -> none }\n",
        "@tokens/embedding[batch -> pod by 3:1, * -> none]\n",
    ],
)
def test_text(text: str) -> None:
    layout = parse_layout(text)
    assert print_layout(layout) == text
    assert parse_layout(print_layout(layout)) == layout


@pytest.mark.parametrize(
    ("text", "mesh", "message"),
    [
        ("batch -> pod by", {"pod": 2}, "E0: expected 'speed', or whole numbers as in 'by 12:4', found ';'"),
        ("batch -> pod by 1.5:1", {"pod": 2}, "E0: expected 'speed', or whole numbers as in 'by 12:4', found '1.5'"),
        ("batch -> pod by 0:0", {"pod": 2}, "E0: all shares are 0"),
        ("batch -> pod by spede", {"pod": 2}, "E0: expected 'speed', or whole numbers"),
        ("batch -> pod pad by 3:1", {"pod": 2}, "E0: 'pad' and 'by' both say how long shards are"),
        ("batch -> pod? by 3:1", {"pod": 2}, "E0: '?' and 'by' both say how long shards are"),
        ("* -> pod by 3:1", {"pod": 2}, "E0: shares are for one dim, not for *"),
        (
            "batch -> pod by 3:1; seq -> sp by 3:1",
            {"pod": 2, "sp": 2},
            "E0: shares are for one dim, not for seq beside",
        ),
        ("batch -> pods by 3:1", {"pod": 2}, "E1: there is no axis 'pods'; did you mean 'pod'?"),
        ("btach -> pod by 3:1", {"pod": 2}, "E1: there is no dim 'btach'; did you mean 'batch'?"),
        ("input { batch -> pod by 3:1 }; act { batch -> pod by 1:3 }", {"pod": 2}, "E2: two rules give 'batch' other"),
        ("batch -> pod by 3:1:1", {"pod": 2}, "E4: 'by 3:1:1' has 3 shares, and 'pod' 2 places"),
        ("batch -> pod*dp by 4:1:1:4", {"pod": 2, "dp": 2}, "E4: the shares 4:1:1:4 are no product of shares along"),
        ("batch -> pod*dp by 3:1", {"pod": 2, "dp": 3}, "E4: 'dp' = 3 does not divide 16 of 'batch'"),
        ("micro 3; batch -> pod by 3:1", {"pod": 2}, "E4: micro 3 does not divide 'batch', 16"),
        ("d_model -> pod by 3:1", {"pod": 2}, "E5: 'd_model' is a dim of tokens.weight, which is split evenly"),
        ("param { vocab -> pod by 3:1 }", {"pod": 2}, "E5: parameters and buffers are split evenly"),
        ("batch -> pod by speed", {"pod": 2}, "E5: the speeds along pod are unknown"),
    ],
)
def test_mistakes(graph: NamedGraph, text: str, mesh: dict[str, int], message: str) -> None:
    with pytest.raises(LayoutError) as error:
        propagate(graph, parse_layout(f"{text}; * -> none" if "* ->" not in text else text), SubMesh(mesh))
    assert str(error.value).startswith(message)
    assert "\nfix: " in str(error.value)


def test_shares_along_a_product(graph: NamedGraph) -> None:
    axes = SubMesh({"pod": 2, "dp": 2})
    for text, shares in (
        ("batch -> pod*dp by 3:1", (("pod", (3, 1)),)),
        ("batch -> dp*pod by 2:2:1:3", None),
        ("batch -> dp*pod by 3:1:3:1", (("pod", (3, 1)),)),
        ("batch -> pod*dp by 9:3:3:1", (("pod", (3, 1)), ("dp", (3, 1)))),
    ):
        layout = parse_layout(f"{text}; * -> none")
        if shares is None:
            with pytest.raises(LayoutError, match="no product"):
                propagate(graph, layout, axes)
            continue
        found = propagate(graph, layout, axes).axes.shares
        assert found == Shares("batch", shares)


def test_speeds_become_numbers(graph: NamedGraph) -> None:
    layout = parse_layout("batch -> pod*dp by speed; * -> none")
    axes = SubMesh({"pod": 2, "dp": 2})
    assert print_layout(by_numbers(graph, layout, axes, {"pod": (3.1, 1.0)})) == "batch -> pod*dp by 3:1\n* -> none\n"
    found = by_numbers(graph, layout, axes, {"dp": (3.1, 1.0)})
    assert print_layout(found) == "batch -> pod*dp by 3:1:3:1\n* -> none\n"
    assert propagate(graph, found, axes).axes.shares == Shares("batch", (("dp", (3, 1)),))
    assert print_layout(by_numbers(graph, layout, axes, {})) == "batch -> pod*dp\n* -> none\n"


def test_each_micro_batch_is_split_by_shares() -> None:
    model, inputs = mlp(batch=256, device="meta")
    graph = autopar.trace(model, inputs)
    layout = parse_layout("micro 4; batch -> dp by speed; * -> none")
    speeds = {"dp": (990.0,) * 4 + (312.0,) * 4}
    found = by_numbers(graph, layout, SubMesh({"dp": 8}), speeds, 4)
    counts = greedy(64, speeds["dp"])
    assert propagate(graph, found, SubMesh({"dp": 8})).axes.shares == Shares(
        "batch", (("dp", tuple(one // gcd(*counts) for one in counts)),)
    )


def test_a_view_that_takes_the_batch_apart_needs_shares_of_its_first_part() -> None:
    class Apart(nn.Module):
        def forward(self, x: object) -> object:
            return x.reshape(4, 4, -1).sum(1)  # type: ignore[attr-defined]

    import torch

    graph = autopar.trace(Apart(), (torch.randn(16, 3),), dims={"x": "batch d_in"})
    axes = SubMesh({"pod": 2})
    assert propagate(graph, parse_layout("batch -> pod by 3:1; * -> none"), axes).axes.shares is not None
