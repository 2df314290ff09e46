"""What every command prints, plain, on a terminal that is none: the whole text."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.cli import COMMANDS, main
from autopar.sharding.layout import language
from tests.cli.cases import PRINTED
from tests.cli.kept import FOLDER, masked, same_as_kept

STRATEGIES = ("ddp", "fsdp", "fsdp_tp", "gshard_moe", "megatron", "megatron_sp", "spatial", "zero1")
PROMISES = (
    "batch -> dp; * -> none\nforbid all_reduce(grad) over dp\nwarn all_reduce(grad) over dp\nlimit memory 10GiB\n"
)

ODD = """
import torch
from torch import nn

class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.even, self.odd = nn.Linear(4, 4), nn.Linear(4, 4)
    def forward(self, x):
        return self.odd(self.even(x) * (2.0 if torch.compiler.is_exporting() else 1.0))

def odd():
    torch.manual_seed(0)
    return Odd(), (torch.ones(4, 4),)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("promises.lay").write_text(PROMISES)
    # The strategies of these texts: one more in the folder changes none of them.
    shipped = Path(tmp_path / "strategies")
    shipped.mkdir()
    for name in STRATEGIES:
        shutil.copy(language.strategy_path(name), shipped)
    monkeypatch.setattr(language, "data_folder", lambda name: shipped)
    Path("odd.py").write_text(ODD)


@pytest.mark.parametrize("name", PRINTED)
def test_reads_as_before(capsys: pytest.CaptureFixture[str], name: str) -> None:
    code, words = PRINTED[name]
    assert main(list(words)) == code
    out, err = capsys.readouterr()
    assert err == "", "no progress where nobody looks"
    same_as_kept(name, out.replace(str(Path.cwd()), "."))


@pytest.mark.slow
def test_calibrate_reads_as_before() -> None:
    """In processes of its own; which rows there are is golden, what was measured is not."""
    words = ("calibrate", "--processes", "2", "--largest", "64 KiB", "--seconds", "0.01", "--output", "mine.toml")
    done = subprocess.run([sys.executable, "-m", "autopar", *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    same_as_kept("calibrate", done.stdout)
    assert main(["clusters", "mine.toml"]) == 0


def test_every_command_has_a_golden_text() -> None:
    # What a doctor finds is of the machine: tests/cli/test_doctor_command.py.
    tried = {words[0] for _, words in PRINTED.values()} | {"calibrate", "doctor"}
    assert {command.__name__.rpartition(".")[2] for command in COMMANDS} == tried
    assert {path.stem for path in FOLDER.glob("*.txt")} == {*PRINTED, "calibrate"}, "no golden text is left over"


def test_what_is_masked() -> None:
    assert masked("dp  all_reduce  2  237.8 KiB  556 us  11.7 %  × 1.06  ×2  [96, 192]\n") == (
        "dp  all_reduce  2  #  #  #  × #  ×2  [96, 192]\n"
    )
    assert masked("  output 0   9.9e-16\n     step  +3.1 ms\n      9.21 us  #\n") == (
        "  ...  #\n     step  #\n  #  #\n"
    )
    assert masked("      12.1  shrink   445\na.lay:1 | x\n        | ^\n") == "  #  shrink  445\na.lay:1 | x\n  | ^\n"
