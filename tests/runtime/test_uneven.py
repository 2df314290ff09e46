"""Sizes that the mesh does not divide: models on real ranks whose shards are uneven, and some empty."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from autopar.sharding.reshard_insertion import StepCollective
from examples.gpt import gpt
from examples.resnet import resnet
from tests.runtime.launcher import launch
from tests.runtime.test_published_strategies import compare

Found = tuple[float, tuple[StepCollective, ...]]

GPT2_VOCAB = 50257
BATCH = "batch -> dp pad; * -> none"
SHARDED = f"{BATCH}\nparam, grad, opt {{ * -> dp pad }}"
TILES = "batch -> dp pad; height -> sy pad; width -> sx pad; * -> none"


def words(**sizes: Any) -> Any:
    torch.manual_seed(0)
    return gpt(layers=1, d_model=24, **sizes)


def pictures(**sizes: Any) -> Any:
    torch.manual_seed(0)
    return resnet(depth=10, width=4, loss=True, train=True, **sizes)


def run(cases: Mapping[str, tuple[Any, dict[str, Any], str, str]]) -> dict[str, Found]:
    return {name: compare(*make(**sizes), layout, mesh) for name, (make, sizes, layout, mesh) in cases.items()}  # type: ignore[call-arg]


ON_TWO = {
    "vocab": (words, {"vocab": GPT2_VOCAB, "batch": 2, "seq": 5}, "megatron", "dp=1,tp=2"),
    "batch": (words, {"batch": 5}, BATCH, "dp=2"),
    "stored": (words, {"batch": 5, "vocab": 11}, SHARDED, "dp=2"),
    "heights": (pictures, {"image": 43, "batch": 3}, TILES, "dp=1,sy=2,sx=1"),
}
ON_FOUR = {
    "vocab": (words, {"vocab": GPT2_VOCAB, "batch": 2, "seq": 5}, "megatron", "dp=1,tp=4"),
    "empty batch": (words, {"batch": 5}, BATCH, "dp=4"),
    "empty vocab": (words, {"batch": 3, "vocab": 9}, "vocab -> tp pad; batch -> dp pad; * -> none", "dp=1,tp=4"),
    "stored, empty": (words, {"batch": 5, "vocab": 9}, SHARDED, "dp=4"),
    "batch and vocab": (words, {"batch": 3, "vocab": 11, "seq": 7}, "vocab -> tp pad; " + BATCH, "dp=2,tp=2"),
    "tiles": (pictures, {"image": 43, "batch": 3}, TILES, "dp=1,sy=2,sx=2"),
    "empty tiles": (pictures, {"image": 37, "batch": 3}, TILES, "dp=1,sy=4,sx=1"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "cases"), [(2, ON_TWO), (4, ON_FOUR)], ids=["2", "4"])
def test_uneven_shards_give_what_one_process_gives(ranks: int, cases: Mapping[str, Any]) -> None:
    for results in launch(run, cases, ranks=ranks):
        for name, (worst, _) in results.items():
            assert worst < 1e-9, (name, worst)
    sent = {name: found for name, (_, found) in results.items()}
    logits = 2 * 5 * GPT2_VOCAB * 8
    assert max(one.bytes for one in sent["vocab"]) < logits / 100, "logits are not gathered"
