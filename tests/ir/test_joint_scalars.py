"""Scalars that are summed over ranks at once are priced as one collective."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.cost.evaluate import evaluate
from autopar.cost.hardware.cluster import Cluster, load_cluster
from autopar.cost.network import Network
from autopar.sharding.layout.language import choose_layout
from autopar.sharding.time_slice import propagate_plan
from examples.gpt import gpt
from examples.moe import moe


class Sums(nn.Module):
    """The first two wait for each other; the third for none: the second is used before it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.sum(), (x * x).sum()
        scaled = x / second
        return first * scaled.sum()


def test_sums_that_nothing_uses_until_the_next() -> None:
    graph = autopar.trace(Sums(), (torch.rand(8, 4),))
    assert list(graph.shares.values()) == [0.5, 0.5]
    assert dict(autopar.trace(*gpt()).shares) == {"/cross_entropy_loss": 0.5, "/sum": 0.5}


@pytest.mark.parametrize("make", [gpt, moe])
def test_they_take_one_collective(make: Any) -> None:
    """A loss and its number of targets, of which both are sent."""
    graph, cluster = autopar.trace(*make()), load_cluster("local-cpu")
    plan = propagate_plan(graph, choose_layout("ddp", {"dp": 2}), {"dp": 2})
    small = [one for one in evaluate(graph, plan, cluster).communication if one.of == "values"]
    (sums,) = small
    others = sums.count - 2
    together = sums.seconds - others * _alone(cluster)
    assert together == pytest.approx(_alone(cluster), rel=1e-2)


def _alone(cluster: Cluster) -> float:
    return Network(cluster, {"dp": 2}).seconds("all_reduce", ("dp",), 4.0)
