"""Packed documents on real ranks: what one process gets, and the scores of the documents alone."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.rules.shard_call import document_ranges, documents
from tests.masks import Masks
from tests.runtime.launcher import launch
from tests.runtime.test_folded_sequence import Pairs, difference
from tests.runtime.test_long_context_models import VOCAB, llama

pytest.importorskip("transformers")

ROWS = 128

# Lengths of the documents of two samples, by kind.
LENGTHS = {
    "uneven": ([100, 3, 2, 5, 7, 2, 9], [40, 40, 48]),
    # One document crosses all shards.
    "whole": ([128], [2, 124, 2]),
    "short": ([2] * 64, [5] * 25 + [3]),
    "single": ([1] * 128, [1, 60, 1, 1, 1, 60, 4]),
    "alike": ([50, 30, 48], [50, 30, 48]),
}


def positions_of(lengths: tuple[list[int], ...]) -> Tensor:
    return torch.stack([torch.cat([torch.arange(count) for count in sample]) for sample in lengths])


def needed(lengths: tuple[list[int], ...]) -> float:
    return sum(count * (count + 1) / 2 for sample in lengths for count in sample)


def inputs(positions: Tensor) -> dict[str, Tensor]:
    ids = torch.randint(0, VOCAB, positions.shape, generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "position_ids": positions}


def apart(model: nn.Module, parallel: Any, given: dict[str, Tensor]) -> Mapping[str, float]:
    """Return the differences from one process, the pairs of this rank, and its largest tensor of truths."""
    model.zero_grad()
    parallel.zero_grad()
    expected = model(**given).logits
    expected.square().sum().backward()
    read = documents.read_ends
    reads: list[Tensor] = []
    with pytest.MonkeyPatch.context() as patch, Pairs() as exact:
        # No documents share a call.
        patch.setattr(document_ranges, "SHORT_ROWS", 0)
        parallel(**given)
    with pytest.MonkeyPatch.context() as patch, Pairs() as pairs, Masks() as masks:
        patch.setattr(documents, "read_ends", lambda table: reads.append(table) or read(table))
        found = parallel(**given).logits
        forward = pairs.count
        found.square().sum().backward()
    gradients = (difference(one.grad, parallel.get_parameter(name).grad) for name, one in model.named_parameters())
    return {
        "logits": difference(expected, found),
        "gradients": max(gradients),
        "pairs": exact.count,
        "computed": forward,
        "truths": masks.truths,
        "reads": len(reads),
    }


LAYOUTS = {
    "whole": "* -> none",
    "plain": "seq -> cp; * -> none",
    "fold 2": "fold seq; seq -> cp; * -> none",
    "fold 16": "fold seq 16; seq -> cp; * -> none",
    "heads": """
        fold seq
        seq -> cp
        * -> none
        act[heads] { (heads, kv_heads) -> cp; seq -> none }
        act[kv_heads] { kv_heads -> cp; seq -> none }
    """,
}


def steps(names: tuple[str, ...], ranks: int) -> dict[str, dict[str, Mapping[str, float]]]:
    torch.manual_seed(0)
    model = llama().double()
    found: dict[str, dict[str, Mapping[str, float]]] = {}
    for name in names:
        # Traced with plain positions.
        given = inputs(torch.arange(ROWS).expand(2, -1).contiguous())
        parallel = autopar.parallelize(copy.deepcopy(model), f"cp={ranks}", given, layout=LAYOUTS[name], outputs="full")
        found[name] = {kind: apart(model, parallel, inputs(positions_of(lengths))) for kind, lengths in LENGTHS.items()}
    return found


def check(found: list[dict[str, dict[str, Mapping[str, float]]]]) -> None:
    for name, kind in [(name, kind) for name in found[0] for kind in LENGTHS]:
        ranks = [one[name][kind] for one in found]
        assert max(rank[what] for rank in ranks for what in ("logits", "gradients")) < 1e-10, (name, kind, ranks)
        # One for all layers and both directions.
        assert [rank["reads"] for rank in ranks] == [1] * len(ranks), (name, kind)
        # No mask of rows by keys.
        assert max(rank["truths"] for rank in ranks) <= 2 * ROWS, (name, kind, ranks)
        # Of two layers. Samples with the same documents share calls; single tokens are masked.
        pairs = [rank["pairs"] / 2 * (2 if kind == "alike" else 1) for rank in ranks]
        if name in ("whole", "heads"):
            pairs = pairs[:1]
        if kind != "single":
            assert sum(pairs) == needed(LENGTHS[kind]), (name, kind, pairs)
        # Short documents share calls of 64 rows.
        assert all(rank["computed"] <= rank["pairs"] + 2 * 2 * ROWS * 80 for rank in ranks), (name, kind, ranks)


@pytest.mark.slow
def test_two_ranks() -> None:
    check(launch(steps, tuple(LAYOUTS), 2, ranks=2))


def test_four_ranks() -> None:
    check(launch(steps, ("plain", "fold 16"), 4, ranks=4))


def other_ways() -> dict[str, Mapping[str, float]]:
    torch.manual_seed(0)
    model = llama().double()
    given = inputs(positions_of(LENGTHS["uneven"]))
    ways = {
        "recomputed": ("dp=2,cp=2", "fold seq 16; batch -> dp; seq -> cp; recompute full @model.layers.*; * -> none"),
        "micro-batches": ("cp=4", "micro 2; fold seq 4; seq -> cp; * -> none"),
        "split vocabulary": ("cp=2,tp=2", "fold seq; seq -> cp; vocab -> tp; * -> none"),
    }
    found = {}
    for name, (mesh, layout) in ways.items():
        parallel: Any = autopar.parallelize(copy.deepcopy(model), mesh, given, layout=layout, outputs="full")
        found[name] = apart(model, parallel, given)
        # Another length, for which the graph is made from its symbolic form.
        found[f"{name}, longer"] = apart(model, parallel, inputs(positions_of(([100, 60], [3, 150, 7]))))
    # The compiler does not look into the calls, which depend on data.
    compiled: Any = autopar.parallelize(copy.deepcopy(model), "cp=4", given, layout=LAYOUTS["fold 16"], outputs="full")
    call: Any = torch.compile(compiled, backend="aot_eager")
    expected, result = model(**given).logits, call(**given).logits
    found["compiled"] = {"logits": difference(expected, result), "gradients": 0.0}
    return found


@pytest.mark.slow
def test_other_ways_to_run() -> None:
    for rank in launch(other_ways, ranks=4):
        assert max(one[what] for one in rank.values() for what in ("logits", "gradients")) < 1e-10, rank
