"""What random numbers a shard draws: which op draws how, from which seed, and which part of the whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import AutoparError
from autopar.ir.graph import NamedGraph
from autopar.lowering.modules.random_draws import DrawShard, DropoutMask, LocalRegion, seeded, with_generator
from autopar.lowering.modules.shard_ops import Dropout
from autopar.lowering.passes.random_ops import _MAKERS, _SAMPLES, DrawnOp, RandomOps
from autopar.rules.registry import rule_table
from autopar.sharding.choices import Choice
from autopar.sharding.sharding import Atoms, coordinates

AXES = {"a": 2, "b": 2}
CPU = torch.device("cpu")


def drawn(graph: NamedGraph, choice: Choice, at: dict[str, int]) -> tuple[list[str], list[DrawnOp]]:
    """The names of what the ops of a graph draw on one rank."""
    drawings = RandomOps(graph, AXES, at, CPU)
    sources = {node.name: node for node in graph.exported.graph_module.graph.nodes}
    made = [drawings.make(node, sources[node.node], choice, {}, False) for node in graph.nodes]
    return [one.draw for one in made if one is not None], drawings.ops


def test_only_axes_that_split_what_is_drawn_count() -> None:
    model = nn.Sequential(nn.Dropout(0.1), nn.Dropout(0.1)).train()
    graph = autopar.trace(model, (torch.randn(4, 6),))
    factor = graph.nodes[0].rule.factors[0]
    for split, axes in (
        (Choice(), ""),
        (Choice((((factor, 0), ("a",)),)), "a"),
        (Choice((((factor, 0), ("b", "a")),)), "ab"),
    ):
        names = {tuple(at.items()): drawn(graph, split, at)[0] for at in coordinates(AXES)}
        for at, mine in names.items():
            assert mine[0] != mine[1], "each op draws for itself"
            for other, theirs in names.items():
                same = all(dict(at)[axis] == dict(other)[axis] for axis in axes)
                assert (mine == theirs) == same


def test_the_same_ops_are_listed_on_all_ranks() -> None:
    graph = autopar.trace(nn.Dropout(0.1).train(), (torch.randn(4, 6),))
    choice = Choice((((graph.nodes[0].rule.factors[0], 0), ("a",)),))
    listed = [drawn(graph, choice, at)[1] for at in coordinates(AXES)]
    assert listed[0] == [DrawnOp("/native_dropout", "aten.native_dropout.default", "a -> a", True)]
    assert all(one == listed[0] for one in listed)


def test_one_rank_draws_as_the_model_does() -> None:
    graph = autopar.trace(nn.Dropout(0.1).train(), (torch.randn(4, 6),))
    source = next(n for n in graph.exported.graph_module.graph.nodes if n.name == graph.nodes[0].node)
    assert (
        RandomOps(graph, {"a": 1, "b": 1}, {"a": 0, "b": 0}, CPU).make(graph.nodes[0], source, Choice(), {}, False)
        is None
    )


def test_every_op_of_the_table_that_draws_is_made_or_refused() -> None:
    """An op with a new rule that draws must be one or the other knowingly."""
    aten = [op for op in rule_table() if op.startswith("aten.")]
    drawing = {op for op in aten if torch.Tag.nondeterministic_seeded in overload_of(op).tags}
    refused = {name for name in drawing if name not in _MAKERS}
    taken_apart_while_tracing = {"aten.alpha_dropout.default", "aten.feature_dropout.default"}
    drawing_inside = {f"aten.{name}.input" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")}
    assert refused == taken_apart_while_tracing | drawing_inside
    assert set(_MAKERS) <= drawing


def overload_of(op: str) -> torch._ops.OpOverload:
    namespace, name, overload = op.split(".")
    found: torch._ops.OpOverload = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    return found


def test_every_sample_can_be_drawn_from_a_generator() -> None:
    for name in _SAMPLES.split():
        names = [argument.name for argument in with_generator(overload_of(f"aten.{name}"))._schema.arguments]
        assert "generator" in names, name


def test_seeds_of_one_call_differ() -> None:
    """In the 32 bits that a generator of a CPU reads."""
    shards = [DrawShard(first, index, 8) for first in range(0, 4096, 8) for index in range(8)]
    for number in (0, 1, 2**61 + 7, 2**62 - 1):
        seeds = [seeded(number, shard, CPU).initial_seed() & 0xFFFFFFFF for shard in shards]
        assert len(set(seeds)) == len(shards)
    first = {seeded(number, shards[0], CPU).initial_seed() for number in range(4096)}
    assert len(first) == 4096


def test_dropout_of_low_precision_is_not_biased() -> None:
    """The scale 1 / 0.9 lies between two numbers of bfloat16; its products need not all be rounded the same way."""
    what = DropoutMask(DrawShard(0, 0, 1), LocalRegion(Atoms.plain((4096,)), ((0, 4096),)), (1,), 0.1, CPU)
    x = torch.linspace(1, 2, 4096).bfloat16().requires_grad_()
    dropped: torch.Tensor = Dropout(what, "a -> a", with_mask=False)(torch.tensor([7, 0]), x)
    dropped.sum().backward()
    kept = dropped != 0
    assert 0.85 < float(kept.double().mean()) < 0.95
    assert float((dropped.double() / x.double())[kept].mean().detach()) == pytest.approx(1 / 0.9, rel=2e-4)
    assert x.grad is not None
    assert torch.equal(x.grad != 0, kept)


def test_a_part_of_a_whole() -> None:
    """Where the second of two atoms that make a dim is split, and another dim unevenly."""
    whole = torch.arange(6 * 5).reshape(6, 5)
    cut = LocalRegion(Atoms((2, 3, 5), (2, 1)), ((0, 2), (1, 1), (3, 2)))
    assert cut.take(whole).tolist() == [[8, 9], [23, 24]]
    filled = torch.zeros(5, 6, dtype=torch.int64).t()
    cut.put(torch.tensor([[1, 2], [3, 4]]), filled)
    assert filled[[1, 4]][:, 3:].tolist() == [[1, 2], [3, 4]]
    assert int((filled != 0).sum()) == 4
    assert cut.local_shape == (2, 2)
    assert cut.shape == (6, 5)


def test_what_draws_inside_is_refused() -> None:
    graph = autopar.trace(nn.LSTM(6, 6, 2, dropout=0.3).train(), (torch.randn(5, 4, 6),))
    with pytest.raises(
        AutoparError, match=r"\(aten\.lstm\.input\) draws random numbers, at (?s:.)*nn\.Dropout between"
    ):
        drawn(graph, Choice(), {"a": 0, "b": 0})
