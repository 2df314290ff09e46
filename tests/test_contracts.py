"""The limit on halos, on layouts that are decided and not run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.completion import complete
from autopar.contracts import check_contracts
from autopar.errors import LayoutError
from autopar.layout.language import parse_layout


def answer(layer: nn.Module, limit: str, ranks: int) -> str:
    graph = autopar.trace(layer, (torch.randn(2, 3, 16, 8),), dims={"input": "batch channels height width"})
    layout = parse_layout(f"height -> sy; * -> none\nlimit halo {limit}", "my.lay")
    decisions = complete(graph, layout, {"sy": ranks})
    assert decisions.ops["/conv2d" if isinstance(layer, nn.Conv2d) else "/max_pool2d"].choice.axes == ("sy",)
    try:
        check_contracts(layout, graph, decisions, ())
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
