"""Bad input of every command: a message that names the place, an exit code, no traceback, and no waiting."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.cli import COMMANDS, doctor, main
from tests.cli.cases import AT_ONCE, LATER, ROOT

BROKEN = "# autopar plan\n#   model GPT\n#   clutser h100\n\nmesh dp=2\n"
TARGETS = """
import torch
from torch import nn

def nothing(): pass
def only_a_model(): return nn.Linear(2, 2)
def number(): return 3, (torch.zeros(2),)
def listed(): return nn.Linear(2, 2), [torch.zeros(2, 2)]
def fails(): raise RuntimeError("no data here")
def leaves(): raise SystemExit(3)
def too_many(): return nn.Linear(2, 2), (torch.zeros(2, 2), torch.zeros(2))
class Branch(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x
def branch(): return Branch(), (torch.ones(3),)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("targets.py").write_text(TARGETS)
    Path("broken.lay").write_text(BROKEN)
    Path("layout.lay").write_text("batch -> dp\n* -> none\n")
    two_levels = (ROOT / "tests/cost/two_levels.toml").read_text()
    Path("mine.toml").write_text(two_levels.replace("units = 4", "unites = 4"))


def test_every_command_is_tried_with_five_kinds() -> None:
    for command in COMMANDS:
        if command is doctor:  # it takes no words
            continue
        name = command.__name__.rpartition(".")[2]
        assert len([says for words, _, says in (*AT_ONCE, *LATER) if words[0] == name]) >= 5, name


def shown(words: tuple[str, ...]) -> str:
    return " ".join(words).replace(str(ROOT), ".")


@pytest.mark.parametrize(("words", "code", "says"), LATER, ids=[shown(words) for words, _, _ in LATER])
def test_what_is_said(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], code: int, says: str) -> None:
    assert main(list(words)) == code
    out, err = capsys.readouterr()
    assert says in (out or err)
    assert not (out and err)
    assert out or err.startswith(f"autopar {words[0]}: ")
    assert "Traceback" not in out + err
    assert not Path("r.html").exists()
    assert not Path("new.toml").exists()


TRY = """
import contextlib, io, json, sys
from autopar.cli import main

found = []
for words in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            code = main(words)
        except SystemExit as leaves:
            code = leaves.code
    found.append([code, said.getvalue(), "torch" in sys.modules])
print(json.dumps(found))
"""


def test_what_is_said_at_once() -> None:
    """All in one process: once torch is loaded, it stays, and the word that loaded it is the first that fails."""
    words = json.dumps([words for words, _, _ in AT_ONCE])
    done = subprocess.run([sys.executable, "-c", TRY, words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for (asked, code, says), (found, said, has_torch) in zip(AT_ONCE, json.loads(done.stdout), strict=True):
        assert (found, has_torch) == (code, False), (asked, said)
        assert says in said, asked
        assert said.startswith((f"autopar {asked[0]}: ", "usage: autopar"))
        assert "Traceback" not in said


def test_help_needs_no_torch() -> None:
    """Loading torch takes seconds; everything else that help needs is small."""
    names = [command.__name__.rpartition(".")[2] for command in COMMANDS]
    code = (
        "import sys\nfrom autopar.cli import main\n"
        f"for words in ([], *([name] for name in {names})):\n"
        "    try: main([*words, '--help'])\n"
        "    except SystemExit as leaves: assert leaves.code == 0\n"
        "heavy = {'torch', 'numpy', 'ortools', 'numba', 'rich', 'transformers', 'shtab'} & set(sys.modules)\n"
        "sys.exit(f'loaded: {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in names:
        assert f"  autopar {name}" in done.stdout, "each shows examples"
