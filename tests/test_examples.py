"""The examples run, train, and are traced without a change to what they compute."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar import trace
from autopar.cli import main
from examples.custom_op import custom_op
from examples.gpt import gpt
from examples.llama3_8b import llama3_8b
from examples.lora_llama import lora_llama
from examples.mlp import mlp
from examples.moe import moe
from examples.resnet import resnet
from examples.vit import vit
from tests.equivalence import assert_equivalent

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("target", "arguments"),
    [
        (mlp, {}),
        (mlp, {"loss": True, "dropout": 0.1}),
        (gpt, {}),
        (gpt, {"loss": False, "dropout": 0.1}),
        (resnet, {"depth": 10, "loss": True}),
        pytest.param(resnet, {"depth": 10, "train": True}, marks=pytest.mark.slow),
        pytest.param(resnet, {"depth": 50, "train": True, "loss": True}, marks=pytest.mark.slow),
        (moe, {}),
        (vit, {}),
        (vit, {"loss": False}),
        (custom_op, {}),
    ],
    ids=lambda value: value.__name__ if callable(value) else ",".join(value) or "default",
)
def test_traced_example_equals_the_model(target: Callable[..., Any], arguments: dict[str, Any]) -> None:
    torch.manual_seed(0)
    assert_equivalent(*target(**arguments))


@pytest.mark.parametrize("target", [mlp, gpt, resnet, moe, vit])
def test_example_on_meta_has_no_memory(target: Callable[..., Any]) -> None:
    model, inputs = target(device="meta")
    values = inputs.values() if isinstance(inputs, dict) else inputs
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers(), *values)} == {"meta"}


def test_llama3_8b_has_the_real_sizes() -> None:
    model, inputs = llama3_8b()
    assert sum(parameter.numel() for parameter in model.parameters()) == 8_030_261_248
    assert model.get_parameter("model.layers.0.self_attn.k_proj.weight").shape == (1024, 4096)
    assert inputs["input_ids"].shape == (16, 8192)


def test_adapters_beside_a_llama_of_real_size() -> None:
    model, _ = lora_llama(size="70b", rank=8)
    counts = {True: 0, False: 0}
    for parameter in model.parameters():
        counts[parameter.requires_grad] += parameter.numel()
    assert counts[False] == 70_553_706_496
    widths = (2 * 8192, 8192 + 1024, 8192 + 1024, 2 * 8192, *[8192 + 28672] * 3)
    assert counts[True] == 80 * 8 * sum(widths)


def test_moe_experts_take_no_more_than_their_capacity() -> None:
    torch.manual_seed(0)
    model, _ = moe(capacity_factor=1.0, seq=40, experts=4)
    x = torch.randn(2, 40, 48)
    weights, _ = model.blocks[0].experts.router(x)
    places = (weights > 0).sum(dim=1)
    assert weights.shape == (2, 40, 4, 10)
    assert places.max() == 1, "a place in a queue is given once"
    sent = (weights > 0).sum(dim=(2, 3))
    assert sent.max() == 2
    assert sent.min() < 2, "with so little room some tokens are dropped"


def test_vit_has_the_dims_of_a_transformer() -> None:
    graph = trace(*vit(device="meta"))
    assert graph.tensors["blocks.0.up.weight"].dims == ("d_ff", "d_model")
    assert graph.coverage()["replicated"] == 0


@pytest.mark.parametrize(
    ("settings", "code", "says"),
    [([], 0, "yes: "), (["--set", "batch=6000", "--set", "device=meta"], 1, "no: ")],
    ids=["kept", "memory"],
)
def test_contract(settings: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    target, layout = str(ROOT / "examples/gpt.py:gpt"), str(ROOT / "examples/contract.lay")
    assert main(["check", target, "--layout", layout, *settings]) == code
    assert capsys.readouterr().out.startswith(says)


def test_contract_is_the_one_that_the_docs_show() -> None:
    text = (ROOT / "examples/contract.lay").read_text()
    assert text.partition("\n\n")[2] in (ROOT / "docs/ci.md").read_text()


def test_notebook_runs_cell_by_cell(capsys: pytest.CaptureFixture[str]) -> None:
    shown = run_notebook("examples/plan.ipynb")
    assert "GPT on dp=2,tp=2" in capsys.readouterr().out
    assert "<" in shown._repr_html_()


@pytest.mark.slow
def test_notebook_trains_on_two_ranks(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    run_notebook("examples/train.ipynb")
    said = capsys.readouterr().out
    assert "They agree" in said
    losses = [float(line.split()[-1]) for line in said.splitlines() if re.match(r"step +\d+  loss", line)]
    assert len(losses) == 6, said
    assert losses[2] < losses[0], "of the plan"
    # The model and the batches are the same under both layouts.
    assert losses[:3] == pytest.approx(losses[3:], abs=2e-3)


def run_notebook(path: str) -> Any:
    """Run the code cells of a notebook; return what it shows for the last one."""
    notebook = json.loads((ROOT / path).read_text())
    names: dict[str, Any] = {}
    shown: Any = None
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"], "a notebook is kept without its outputs"
            *statements, last = ast.parse("".join(cell["source"])).body
            exec(compile(ast.Module(statements, []), cell["id"], "exec"), names)
            shown = evaluated(last, cell["id"], names)
    return shown


def evaluated(last: ast.stmt, name: str, names: dict[str, Any]) -> Any:
    """The value that a notebook shows for the last statement of a cell."""
    if isinstance(last, ast.Expr):
        return eval(compile(ast.Expression(last.value), name, "eval"), names)
    exec(compile(ast.Module([last], []), name, "exec"), names)
    return None
