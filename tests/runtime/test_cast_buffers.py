"""Models that fail on buffers in float32 beside half weights: their buffers are cast, and stay as they are stored."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import autopar
from autopar.errors import AutoparWarning, TraceError
from tests.runtime.launcher import launch
from tests.runtime.training import gradients

D, SEQ = 16, 8


class Layer(nn.Module):
    """A layer with a table of its own, which it adds in front of a normalisation."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.norm, self.up = nn.LayerNorm(D), nn.Linear(D, D)
        self.table = nn.Buffer(torch.linspace(-1, 1, SEQ * D).view(SEQ, D))

    def forward(self, x: Tensor) -> Tensor:
        added = x + self.table
        if self.where == "changed":
            self.table.add_(1)
        if self.where == "replaced":
            self.table = self.table + 1
        if self.where == "scaled":  # float32 goes no further
            added = added.to(x.dtype)
        return x + self.up(self.norm(added) if self.where == "norm" else added)


class Tables(nn.Module):
    def __init__(self, where: str = "norm") -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(where) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


def made(where: str = "norm") -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Tables(where), {"x": torch.randn(8, SEQ, D)}


@pytest.mark.parametrize("where", ["norm", "product"])
def test_buffers_are_cast_where_the_model_fails_without(where: str) -> None:
    model, inputs = made(where)
    with pytest.warns(AutoparWarning, match=r"its buffers are cast \(layers.0.table"):
        graph = autopar.trace(model, inputs, precision="bf16")
    assert {graph.tensors[f"layers.{i}.table"].dtype for i in range(4)} == {torch.float32}
    readers = [node.op for node in graph.nodes if any("table" in str(name) for name in node.operands)]
    assert readers == ["aten._to_copy.default"] * 4
    assert len(graph.repeats) == 1, "equal layers stay equal"
    assert all(buffer.dtype == torch.float32 and not isinstance(buffer, FakeTensor) for buffer in model.buffers())


def test_buffers_that_do_no_harm_stay_in_float32() -> None:
    model, inputs = made("scaled")
    with warnings.catch_warnings():
        warnings.simplefilter("error", AutoparWarning)
        graph = autopar.trace(model, inputs, precision="bf16")
    added = [graph.tensors[node.outputs[0]].dtype for node in graph.nodes if "table" in str(node.operands)]
    assert added == [torch.float32] * 4


@pytest.mark.parametrize("where", ["changed", "replaced"])
def test_buffers_that_the_forward_changes_are_not_cast(where: str) -> None:
    model, inputs = made(where)
    with pytest.raises(TraceError, match=r"aten.linear.default has operands in float32 and in torch.bfloat16"):
        autopar.trace(model, inputs, precision="bf16")


def steps(mesh: str, layout: str, compiled: bool) -> tuple[Any, dict[str, Tensor], set[torch.dtype]]:
    """The loss, the gradients and the dtypes of buffers; those of one process in bfloat16 without a mesh."""
    model, inputs = made()
    if not mesh:
        step: Any = model.bfloat16()
        inputs = {name: x.bfloat16() for name, x in inputs.items()}
    else:
        step = autopar.parallelize(model, mesh, inputs, layout=layout, precision="bf16", outputs="loss")
    loss = (torch.compile(step, backend="aot_eager") if compiled else step)(**inputs)
    loss.backward()
    return float(loss.detach()), gradients(step), {buffer.dtype for buffer in step.buffers()}


@pytest.mark.parametrize(
    ("layout", "compiled"), [("fsdp(fsdp=a)", False), ("seq -> a; * -> none", False), ("ddp(dp=a)", True)]
)
def test_a_step_with_cast_buffers_is_that_of_a_half_model(layout: str, compiled: bool) -> None:
    expected, wanted, _ = steps("", "", False)
    for loss, found, dtypes in launch(steps, "a=2", layout, compiled, ranks=2):
        assert dtypes == {torch.float32}
        assert abs(loss - expected) < 0.01 * expected
        assert found.keys() == wanted.keys()
        for name, one in wanted.items():
            assert (found[name] - one.float()).norm() < 0.03 * one.float().norm(), name
