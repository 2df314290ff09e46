"""`autopar verify`: what it finds, what it prints, and what it says to bad input."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from autopar.cli import main

ROOT = Path(__file__).parents[2]
GPT = f"{ROOT}/examples/gpt.py:gpt"


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["verify", *words])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.slow
def test_a_right_plan_agrees(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, GPT, "--mesh", "dp=2", "--layout", "ddp", "--tolerance", "1e-10")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "They agree: relative differences from one process, 1e-10 allowed."
    assert re.fullmatch(rf"{re.escape(GPT)} on dp=2 under ddp: 2 processes, \d+ collectives", lines[1])
    assert all(re.fullmatch(r"  (gradient of|output|buffer) \S+ +\d\.\de-1\d", line) for line in lines[2:7])
    assert re.fullmatch(r"  and \d+ more, no larger", lines[7])
    assert len(lines) == 8


@pytest.mark.slow
def test_rows_of_experts_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    model = f"{ROOT}/examples/hf.py:hf"
    words = [model, "--set", "architecture=mixtral", "--set", "batch=4", "--mesh", "ep=2", "--precision", "fp32"]
    code, out, err = run(capsys, *words, "--layout", "batch -> ep; @*experts* { expert -> ep }")
    assert (code, err) == (0, "")
    (line,) = (line for line in out.splitlines() if "plans assume" in line)
    found = re.fullmatch(r"(\S+) had (\d\.\d\d) times the mean of rows on the busiest rank; plans assume 1\.2\.", line)
    assert found is not None, line
    assert found[1].endswith("mlp.experts/grouped")
    assert 1 <= float(found[2]) <= 2
    code, out, _ = run(capsys, *words, "--layout", "batch -> ep; @*experts* { expert -> ep }", "--json")
    imbalances = json.loads(out)["imbalances"]
    assert f"{imbalances[found[1]]:.2f}" == found[2]
    assert imbalances[found[1]] == max(imbalances.values())


def test_what_differs_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """In the parallel run the model sees other values: it is asked how many processes there are."""
    path = tmp_path / "odd.py"
    path.write_text(
        "import os, torch\nfrom torch import nn\n\n"
        "class Odd(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.even, self.odd = nn.Linear(4, 4), nn.Linear(4, 4)\n"
        "    def forward(self, x):\n"
        "        scale = 2.0 if torch.compiler.is_exporting() else 1.0\n"
        "        return self.odd(self.even(x) * scale)\n\n"
        "def odd():\n"
        "    return Odd(), (torch.ones(4, 4),)\n"
    )
    code, out, _ = run(capsys, f"{path}:odd", "--mesh", "dp=2", "--layout", "* -> none", "--json")
    assert code == 1
    told = json.loads(out)
    assert told["agree"] is False
    relative = {one["name"]: one["relative"] for one in told["differences"]}
    assert relative["gradient of odd.weight"] > 0.1
    assert relative["gradient of odd.bias"] == 0
    falling = [one["relative"] for one in told["differences"]]
    assert falling == sorted(falling, reverse=True)


@pytest.mark.slow
def test_a_model_that_does_not_run_in_float64(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "narrow.py"
    path.write_text(
        "import torch\nfrom torch import nn\n\n"
        "class Narrow(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        if x.dtype is torch.float64:\n"
        "            raise TypeError('no float64 here')\n"
        "        return super().forward(x)\n\n"
        "def narrow():\n"
        "    return Narrow(4, 4), (torch.ones(4, 4),)\n"
    )
    code, _, err = run(capsys, f"{path}:narrow", "--mesh", "dp=2", "--layout", "ddp")
    assert code != 0
    assert "Narrow by itself, in float64: TypeError: no float64 here" in err
    assert "fix: --precision fp32 or --precision own" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """By itself, not by what the others say of the connection that broke."""
    path = tmp_path / "greedy.py"
    path.write_text(
        "import os, signal, torch\nfrom torch import nn\n\n"
        "def greedy():\n"
        "    if os.environ['RANK'] == '1':\n"
        "        print('rank 1 has taken too much', flush=True)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return nn.Linear(4, 4), (torch.ones(4, 4),)\n"
    )
    code, out, err = run(capsys, f"{path}:greedy", "--mesh", "dp=2", "--layout", "ddp")
    assert (code, out) == (2, "")
    assert err == "autopar verify: rank 1 was ended by signal 9:\nrank 1 has taken too much\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gpt.py"], "'gpt.py' names no function; a TARGET is file.py:function"),
        (["nowhere.py:gpt"], "there is no file nowhere.py"),
        ([GPT, "--mesh", "dp=two"], "dp=two"),
        ([GPT, "--mesh", "dp=?"], "every axis needs a number of ranks here, as in dp=2,tp=2"),
        ([GPT, "--dims", "idx"], "--dims idx: expected TENSOR=NAMES"),
        ([GPT, "--set", "layers"], "--set layers: expected name=value"),
        ([GPT, "--device", "cuda"], "--device cuda: torch finds no GPU on this machine\nfix: --device cpu"),
    ],
)
def test_bad_words_are_told_before_anything_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    given = words if "--mesh" in words else [*words, "--mesh", "dp=2"]
    code, out, err = run(capsys, *given)
    assert (code, out) == (2, "")
    assert err.startswith("autopar verify: ")
    assert message in err
    assert "Traceback" not in err


def test_fewer_gpus_than_processes_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    code, out, err = run(capsys, GPT, "--mesh", "dp=2", "--device", "cuda")
    assert (code, out) == (2, "")
    assert "--mesh dp=2 is 2 processes with a GPU each, and this machine has 1\nfix: verify on a smaller mesh" in err


def test_what_a_process_says_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, GPT, "--mesh", "dp=2", "--layout", "megaton")
    assert (code, out) == (2, "")
    assert err.count("there is no strategy 'megaton'; did you mean 'megatron'?") == 1
    assert "Traceback" not in err


def test_a_model_without_values_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, f"{ROOT}/examples/llama3_8b.py:llama3_8b", "--mesh", "tp=2", "--layout", "megatron")
    assert code == 2
    assert "is on the meta device and has no values to compute with" in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "layout"),
    [
        ("vit.py:vit", "batch -> dp; (heads, d_ff) -> tp; * -> none"),
        ("custom_op.py:custom_op", "batch -> dp; d_ff -> tp; * -> none"),
    ],
)
def test_examples_agree_with_one_process(capsys: pytest.CaptureFixture[str], target: str, layout: str) -> None:
    code, out, err = run(capsys, f"{ROOT}/examples/{target}", "--mesh", "dp=2,tp=2", "--layout", layout, "--json")
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert told["collectives"] > 0
    assert told["differences"][0]["relative"] < 1e-10


@pytest.mark.slow
def test_files_of_the_current_folder_stand_for_no_module(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A TARGET by its path still finds what lies beside it."""
    for name in ("torch", "autopar", "json", "tempfile"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')\n")
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "widths_of_mine.py").write_text("WIDTH = 4\n")
    (folder / "random.py").write_text(
        "import torch\nfrom widths_of_mine import WIDTH\n\n"
        "def made():\n    return torch.nn.Linear(WIDTH, 4), (torch.ones(4, WIDTH),)\n"
    )
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, "models/random.py:made", "--mesh", "dp=2", "--layout", "ddp")
    assert (code, err) == (0, "")


ZERO = """
import torch
from torch import nn

class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        nn.init.zeros_(self.last.weight), nn.init.zeros_(self.last.bias)
    def forward(self, x):
        return self.last(self.inner(x).relu() * self.scale.log1p().exp())

def gated():
    return Gated(), (torch.randn(4, 4),)
"""


@pytest.mark.slow
def test_zeros_are_told_and_by_default_there_are_none(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A last projection that begins at zero, as those of LoRA, ControlNet and DiT."""
    monkeypatch.chdir(tmp_path)
    Path("zero.py").write_text(ZERO)
    words = ("zero.py:gated", "--mesh", "dp=2", "--layout", "batch -> dp; * -> none", "--dims", "x=batch features")
    code, out, _ = run(capsys, *words, "--as-initialised")
    assert code == 0
    assert "4 of 6 outputs and gradients are zero on both sides, which shows nothing.\n" in out
    code, out, _ = run(capsys, *words)
    assert code == 0
    assert "zero on both sides" not in out


def test_only_parameters_of_zeros_are_perturbed() -> None:
    from autopar.cli.verify_processes import perturb

    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3))
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    perturb(model)
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == {"1.bias"}
    assert 0 < float(model[1].bias.detach().abs().max()) < 0.2
