"""Models that draw numbers in Python: refused where the graph depends on them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import TraceError


class Repeated(nn.Module):
    """Applies a layer as often as `times` says."""

    def __init__(self, times: Any) -> None:
        super().__init__()
        self.layer, self.times = nn.Linear(4, 4), times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times()):
            x = self.layer(x)
        return x


@pytest.mark.parametrize(
    "times",
    [
        lambda: random.randint(0, 3),
        lambda: random.choice([1, 2]),
        lambda: 1 + (np.random.rand() < 0.1),
        lambda: int(np.random.uniform(1, 3)),
        lambda: int(np.random.RandomState().randint(1) + random.Random(0).randint(1, 1) + random.uniform(0, 2)),
    ],
)
def test_a_graph_of_a_drawn_number_is_refused(times: Any) -> None:
    with pytest.raises(TraceError, match="draws, and each call of the graph would repeat it") as found:
        autopar.trace(Repeated(times), (torch.ones(2, 4),))
    assert "fix: draw it outside of the model" in str(found.value)
    assert "test_python_random.py" in str(found.value)


@pytest.mark.parametrize("module", [random, np.random])
def test_numbers_that_change_nothing_are_drawn(module: Any) -> None:
    def times() -> int:
        return 1 if module.random() < 0.0 else 2

    random.seed(0)
    np.random.seed(0)
    before = random.getstate(), np.random.get_state()[1].tolist()
    graph = autopar.trace(Repeated(times), (torch.ones(2, 4),))
    assert sum("linear" in node.name for node in graph.nodes) == 2
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    assert module.random.__self__ is not None, "the functions are there again"
