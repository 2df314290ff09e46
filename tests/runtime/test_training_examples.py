"""The training examples, started as their users start them: the loss falls, and what a step sends is what it should."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples.hf import hf

ROOT = Path(__file__).parents[2]


def train(script: str, ranks: int, options: str) -> tuple[list[float], list[tuple[str, str, str]]]:
    """The losses that a script prints, and direction, kind and axes of what it lists."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [sys.executable, *torchrun, f"examples/{script}", *shlex.split(options), "--collectives"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)$", done.stdout, re.MULTILINE)]
    return losses, re.findall(r"^(forward|backward) (\w+) over ([\w*]+): [\d,]+ bytes, ", done.stdout, re.MULTILINE)


@pytest.mark.slow
def test_gpt() -> None:
    sizes = "--steps 12 --every 4 --batch 4 --seq 32 --layers 1 --d-model 32"
    losses, sent = train("train_gpt.py", 2, f"--layout megatron --mesh tp=2 {sizes}")
    assert len(losses) == 4, "rank 0 alone prints, at the steps 0, 4, 8 and 11"
    assert losses[-1] < losses[0] - 0.1
    assert ("forward", "all_reduce", "tp") in sent
    assert ("backward", "all_reduce", "tp") in sent


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "layout"),
    [
        ("pp=2,dp=2", "micro 4; pipeline pp 1f1b; ddp"),
        ("pp=2,dp=2", ""),  # the script takes the strategy `pipeline`
        ("pp=2,tp=2", "micro 2; pipeline pp interleaved(2); megatron"),
    ],
)
def test_gpt_in_stages_has_the_losses_of_one_process(mesh: str, layout: str) -> None:
    sizes = "--steps 12 --every 4 --batch 8 --seq 32 --layers 2 --d-model 32"
    given = shlex.join(["--layout", layout]) if layout else ""
    alone, _ = train("train_gpt.py", 1, f"--mesh dp=1 {sizes}")
    losses, sent = train("train_gpt.py", 4, f"--mesh {mesh} {given} {sizes}")
    assert losses == pytest.approx(alone, abs=2e-4)  # four digits are printed
    assert losses[-1] < losses[0] - 0.1
    assert {axes for _, _, axes in sent} == {mesh[-4:-2]}


@pytest.mark.slow
def test_moe() -> None:
    layers = 2
    losses, sent = train("train_moe.py", 4, f"--mesh dp=2,ep=2 --steps 12 --every 11 --layers {layers}")
    assert len(losses) == 2
    assert losses[-1] < losses[0] - 0.5
    for direction in ("forward", "backward"):
        assert sent.count((direction, "all_to_all", "ep")) == 2 * layers
    assert {kind for _, kind, _ in sent} == {"all_to_all", "all_reduce"}


@pytest.mark.slow
def test_resnet() -> None:
    losses, sent = train("train_resnet.py", 4, "--mesh dp=1,sy=2,sx=2 --steps 9 --every 8")
    assert len(losses) == 2
    assert losses[-1] < losses[0] - 0.4
    assert {axes for _, kind, axes in sent if kind == "halo_exchange"} == {"sy", "sx"}
    assert {kind for _, kind, _ in sent} == {"halo_exchange", "all_reduce"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ("--architecture llama --layout fsdp_tp --mesh fsdp=2,tp=2", {"all_gather", "reduce_scatter", "all_reduce"}),
        ("--architecture gpt2 --layout megatron --mesh dp=2,tp=2", {"all_reduce"}),
    ],
)
def test_hugging_face(options: str, kinds: set[str]) -> None:
    pytest.importorskip("transformers")
    losses, sent = train("train_hf.py", 4, f"{options} --steps 9 --every 8")
    assert len(losses) == 2
    assert losses[-1] < losses[0] - 0.4
    assert {kind for _, kind, _ in sent} == kinds
    assert {axes for _, _, axes in sent} == set(options.rpartition(" ")[2].replace("=2", "").split(","))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "layout"), [("fsdp=2", "fsdp"), ("pp=2", "micro 4; pipeline pp zero_bubble; * -> none")]
)
def test_adapters_learn_and_are_saved_alone(mesh: str, layout: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    options = ["--mesh", mesh, "--layout", layout, "--lr", "3e-2", "--save", str(tmp_path)]
    losses, sent = train("lora_llama.py", 2, f"--steps 21 --every 20 {shlex.join(options)}")
    assert len(losses) == 2
    assert losses[-1] < losses[0] - 0.1
    saved = torch.load(tmp_path / "adapters.pt")
    assert len(saved) == 2 * 2 * 7, "two matrices of seven linears of two layers"
    assert all("lora_" in name for name in saved)
    if mesh == "fsdp=2":
        assert len([kind for direction, kind, _ in sent if direction == "backward"]) == len(saved)


@pytest.mark.slow
def test_fine_tuning_changes_only_what_learns(tmp_path: Path) -> None:
    saved = tmp_path / "tuned.pt"
    options = ["--layout", "batch -> dp; d_ff -> ?; * -> none", "--save", str(saved), "--trained", "lm_head"]
    losses, _ = train("finetune_llama.py", 2, f"--mesh dp=1,tp=2 --steps 9 --every 8 {shlex.join(options)}")
    assert len(losses) == 2
    assert losses[-1] < losses[0] - 0.2
    torch.manual_seed(1)
    before = hf("llama", vocab_size=torch.load(saved)["lm_head.weight"].shape[0])[0]
    changed = [name for name, value in torch.load(saved).items() if not torch.equal(value, before.state_dict()[name])]
    assert changed == ["lm_head.weight"]
    before.load_state_dict(torch.load(saved))
