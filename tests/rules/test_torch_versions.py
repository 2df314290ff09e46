"""The releases of torch that the package takes, and the calls that differ between them."""

from __future__ import annotations

import re
import runpy
import tomllib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from packaging.requirements import Requirement
from packaging.version import Version
from torch import Tensor, nn

import autopar
from autopar.rules import torch_versions
from autopar.rules.proof import prove
from autopar.rules.registry import rule_table

ROOT = Path(__file__).parents[2]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return Doubled.apply(self.linear(x)).sum()  # type: ignore[no-any-return,no-untyped-call]


def test_make_matrix_installs_the_two_ends_of_the_range() -> None:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    taken = next(found for found in map(Requirement, dependencies) if found.name == "torch").specifier
    pinned = dict(re.findall(r"^(\w+) \?= torch==(\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert all(taken.contains(version) for version in pinned.values())
    oldest, newest = Version(pinned["OLDEST"]), Version(pinned["NEWEST"])
    assert not taken.contains(f"{oldest.major}.{oldest.minor - 1}.0")
    assert not taken.contains(f"{newest.major}.{newest.minor + 1}.0")
    assert oldest <= Version(pinned["TORCH"]) <= newest
    assert taken.contains(Version(torch.__version__).public)


def test_a_function_applied_by_c_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """As since torch 2.14, where `Function.apply` is a method of C, with no `__func__`."""
    base: Any = torch._C._FunctionBase
    monkeypatch.setattr(torch.autograd.function.Function, "apply", base.__dict__["apply"])
    graph = autopar.trace(Model(), (torch.randn(2, 4),))
    assert any("Doubled" in str(node.op) for node in graph.nodes)


def test_apply_takes_the_class_first() -> None:
    x = torch.randn(3, requires_grad=True)
    found = torch_versions.original_apply()(Doubled, x)
    assert found.equal(x * 2)
    found.sum().backward()
    assert x.grad is not None
    assert x.grad.equal(torch.full((3,), 2.0))


def test_collectives_of_before_2_13(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("all_gather_single", "reduce_scatter_single"):
        monkeypatch.delattr(dist, name, raising=False)
    found = runpy.run_path(str(ROOT / "autopar" / "rules" / "torch_versions.py"))
    assert found["all_gather_single"] is dist.all_gather_into_tensor
    assert found["reduce_scatter_single"] is dist.reduce_scatter_tensor


def test_ops_that_are_tried_do_not_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    """As since 2.15, where what an op warns of comes as a Python warning, which the tests make an error."""
    original = prove.reference

    def warned(*arguments: Any, **others: Any) -> Any:
        warnings.warn("this form is deprecated", UserWarning, stacklevel=2)
        return original(*arguments, **others)

    monkeypatch.setattr(prove, "reference", warned)
    assert prove.prove_entry(rule_table()["aten.relu.default"], seeds=(0,)).holds
