"""Ops that are pinned to what they cannot do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import LayoutError
from autopar.sharding.layout.language import parse_layout
from autopar.sharding.propagation import propagate


class Sums(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(dim=-1)


@pytest.fixture(scope="module")
def graph() -> autopar.NamedGraph:
    model = nn.Sequential(nn.Linear(8, 16), Sums(), nn.Linear(16, 6))
    return autopar.trace(model, (torch.randn(4, 8),), dims={"input": "batch d_model"})


def answer(graph: autopar.NamedGraph, pin: str, **axes: int) -> str:
    with pytest.raises(LayoutError) as error:
        propagate(graph, parse_layout(f"* -> none\n{pin}", "my.lay"), axes)
    return str(error.value)


@pytest.mark.parametrize(
    ("pin", "factor"),
    [
        ("op @1/cumsum[b -> tp]", "b: whole, extent 16, over tp=2"),
        ("op @2/linear[n -> dp]", "n: parallel, extent 6, over dp=4"),
        ("op @2/linear[n -> dp*tp]", "n: parallel, extent 6, over dp=4 * tp=2"),
    ],
)
def test_what_an_op_does_not_allow(graph: autopar.NamedGraph, pin: str, factor: str) -> None:
    op = pin.split("[")[0].removeprefix("op @")
    node = next(node for node in graph.nodes if node.name == op)
    assert answer(graph, pin, dp=4, tp=2) == (
        f"E5: the op {op} ({node.op}) cannot be split as it is pinned\n"
        f"  rule  {node.rule}\n"
        f"  {factor}\n"
        f"  line  {node.origin.source}: {node.origin.source_code}\n"
        f"  my.lay:2 | {pin}\n"
        "           | ^\n"
        "fix: pin a factor that the rule lets split, in shards of one size that its operands can be brought into"
    )


def test_an_op_can_be_pinned_to_one_of_its_factors(graph: autopar.NamedGraph) -> None:
    layout = parse_layout("* -> none; op @2/linear[k -> dp, n -> tp]")
    op_assignment = propagate(graph, layout, {"dp": 4, "tp": 2}).ops["2/linear"]
    assert str(op_assignment.choice) == "k -> dp, n -> tp"
    assert op_assignment.produced[0] is not None
    assert op_assignment.produced[0].partial == {"dp"}


def test_unknown_factor(graph: autopar.NamedGraph) -> None:
    assert answer(graph, "op @2/linear[z -> tp]", tp=2).startswith("E1: there is no factor of 2/linear 'z'\n")
