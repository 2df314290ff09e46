"""`--precision`: what plans, files, comparisons and explanations say of the dtypes of a step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import autopar
from autopar.cli import main
from autopar.errors import AutoparError
from examples.mlp import mlp

ROOT = Path(__file__).parents[2]
MLP = f"{ROOT}/examples/mlp.py:mlp"
ON = ("--mesh", "dp=2", "--cluster", "h100")


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


@pytest.fixture
def saved(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "mlp.plan.lay"
    words = ("--layout", "fsdp(fsdp=dp)", "--precision", "bf16", "--no-experts", "-o", str(path))
    said = run(capsys, "plan", MLP, *ON, *words)
    assert (
        "\n  runs    bf16: compute in bf16, weights in fp32, optimizer states in fp32, gradients summed in fp32\n"
        in said
    )
    return path


def test_a_file_keeps_the_precision(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "\n#   precision       bf16\n" in saved.read_text()
    plan = autopar.Plan.load(saved, *mlp())
    numel = sum(parameter.numel() for parameter in mlp()[0].parameters())
    memory = plan.costs.memory
    assert (memory.parameters_bytes, memory.gradients_bytes) == (2 * numel, 2 * numel), "half of 4 bytes"
    assert memory.optimizer_bytes == 4 * numel
    assert memory.copies_bytes == 0
    sent = {(one.kind, one.direction): one.bytes for one in plan.costs.communication}
    assert sent["all_gather", "forward"] == 2 * numel
    assert sent["reduce_scatter", "backward"] == 4 * numel
    with pytest.raises(
        AutoparError, match=r"(?s)mlp.plan.lay is a plan in bf16: .* in torch.float32, not torch.bfloat16"
    ):
        autopar.Plan.load(saved, graph=autopar.trace(*mlp()))
    name = plan.graph.parameters[0].name
    said = run(capsys, "explain", str(saved), name, "--target", MLP, "--no-alternatives")
    assert said.startswith(f"{name}[")
    assert "  dtypes  stored in float32, gradient summed in float32\n" in said
    with_json = run(capsys, "explain", str(saved), name, "--target", MLP, "--no-alternatives", "--json")
    facts = json.loads(with_json)["tensor"]
    assert (facts["dtype"], facts["stored_dtype"], facts["reduce_dtype"]) == ("bfloat16", "float32", "float32")


def test_a_layout_beside_a_plan_has_its_precision_or_another(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = run(capsys, "compare", str(saved), "ddp", "--target", MLP)
    rows = [line.split() for line in both.splitlines()]
    assert ["precision", "bf16", "bf16"] in rows
    other = run(capsys, "compare", str(saved), "ddp", "--target", MLP, "--precision", "fp32", "--json")
    plans = json.loads(other)["plans"]
    assert [one["precision"]["name"] for one in plans] == ["bf16", "fp32"]
    assert plans[1]["precision"]["compute"] == "fp32"
    page = ("-o", str(saved.with_suffix(".html")))
    assert main(["report", str(saved), "--target", MLP, "--precision", "fp32", *page]) == 2
    assert "which has a precision of its own" in capsys.readouterr().err
    run(capsys, "report", str(saved), "--target", MLP, "--no-experts", *page)
    assert '"precision":"bf16: compute in bf16, weights in fp32' in saved.with_suffix(".html").read_text()


def test_a_step_in_half_precision_is_faster_and_reads_fewer_bytes() -> None:
    model, inputs = mlp()
    found = {
        precision: autopar.plan(model, "dp=2", inputs, layout="ddp", precision=precision, cluster="h100", cache=False)
        for precision in ("fp32", "bf16", "bf16-pure", "bf16, reduce=bf16")
    }
    numel = sum(parameter.numel() for parameter in model.parameters())
    memory = {name: plan.costs.memory for name, plan in found.items()}
    held = {name: one.parameters_bytes + one.gradients_bytes + one.optimizer_bytes for name, one in memory.items()}
    assert held == {"fp32": 16 * numel, "bf16": 16 * numel, "bf16-pure": 8 * numel, "bf16, reduce=bf16": 16 * numel}
    assert memory["bf16"].copies_bytes == 2 * numel, "autograd saves the weights that compute"
    reduced = {name: sum(one.bytes for one in plan.costs.communication) for name, plan in found.items()}
    assert reduced["bf16"] == reduced["fp32"]
    assert reduced["bf16-pure"] == reduced["bf16, reduce=bf16"] == reduced["fp32"] / 2
