"""`autopar --print-completion`: what a shell offers, and what is said where shtab is missing."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.cli import main


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes_commands_options_names_and_files(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here.plan.lay").touch()
    pytest.importorskip("shtab", reason="shtab is not installed: pip install 'autopar[completion]'")
    with pytest.raises(SystemExit) as leaves:
        main(["--print-completion", "bash"])
    assert leaves.value.code == 0
    asked = (
        capsys.readouterr().out
        + """
for words in "autopar ver" "autopar plan --mes" "autopar plan x --cluster h20" "autopar report here.pl"; do
  COMP_WORDS=($words); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=()
  _shtab_autopar autopar "${COMP_WORDS[COMP_CWORD]}"
  echo "${COMPREPLY[@]}"
done
"""
    )
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["verify", "--mesh", "h200", "h200-a3ultra", "h200-efa", "here.plan.lay"]


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes_commands_options_names_and_files(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(
        "shtab", minversion="1.13", reason="no shtab that knows fish: pip install 'autopar[completion]'"
    )
    monkeypatch.chdir(tmp_path)
    Path("here.plan.lay").touch()
    with pytest.raises(SystemExit):
        main(["--print-completion", "fish"])
    words = ("autopar ver", "autopar plan --mes", "autopar plan x --cluster h20", "autopar report here.pl")
    asked = "\n".join([capsys.readouterr().out, *(f"complete -C '{line}'" for line in words)])
    done = subprocess.run(["fish", "--no-config", "-c", asked], capture_output=True, text=True, check=True)
    offered = [line.partition("\t")[0] for line in done.stdout.splitlines()]
    assert offered == ["verify", "--mesh", "h200", "h200-a3ultra", "h200-efa", "here.plan.lay"]


def test_zsh_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab", reason="shtab is not installed: pip install 'autopar[completion]'")
    with pytest.raises(SystemExit):
        main(["--print-completion", "zsh"])
    script = capsys.readouterr().out
    assert script.startswith("#compdef autopar")
    assert [name for name in ("plan", "explain", "compare", "check", "verify", "report") if name not in script] == []


def test_without_shtab_the_fix_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit) as leaves:
        main(["--print-completion", "bash"])
    assert leaves.value.code == 2
    assert "fix: pip install 'autopar[completion]'" in capsys.readouterr().err


def test_an_unknown_shell_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaves:
        main(["--print-completion", "tcl"])
    assert leaves.value.code == 2
    assert "bash" in capsys.readouterr().err
