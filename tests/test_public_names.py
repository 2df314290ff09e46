"""What `import autopar` offers: typed for whoever checks types, and working as a script uses it."""

from __future__ import annotations

import doctest
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import autopar

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = Path(__file__).with_name("user_script.py")


def test_the_script_uses_every_public_name() -> None:
    used = set(re.findall(r"\bautopar\.(\w+)", SCRIPT.read_text()))
    assert used == set(autopar.__all__)


def test_every_public_name_is_there_and_says_what_it_is() -> None:
    assert dir(autopar) == sorted(autopar.__all__)
    for name in autopar.__all__:
        value = getattr(autopar, name)
        assert value.__doc__, name
        assert value.__module__ in (ROOT / "docs" / "api.md").read_text(), f"{name} is in the reference"


def test_the_script_runs() -> None:
    done = run([sys.executable, str(SCRIPT)])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("5 ops in 5 nodes; ['batch', ")
    assert "refused: E1\n" in done.stdout


@pytest.mark.slow
def test_the_script_is_typed(tmp_path: Path) -> None:
    """As a user checks it who has installed autopar: only `py.typed` says that there are types."""
    script = tmp_path / "user_script.py"
    script.write_text(SCRIPT.read_text() + "\nreveal_type(plan)\nreveal_type(parallel)\nreveal_type(autopar.named)\n")
    done = run([sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(ROOT / ".mypy_cache"), str(script)])
    assert "Success" in done.stdout, done.stdout + done.stderr
    shown = re.findall(r'Revealed type is "(.*)"', done.stdout)
    assert shown[:2] == ["autopar.plans.plan.Plan", "autopar.runtime.module.ParallelModule"]
    assert shown[2].endswith(") -> torch._tensor.Tensor")


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MYPYPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=SCRIPT.parent, env=environment, capture_output=True, text=True, check=False)


def public_callables() -> dict[str, list[tuple[str, Callable[..., Any]]]]:
    """Functions and classes of `autopar.__all__`; classes with their public methods, whose examples go on."""
    found: dict[str, list[tuple[str, Callable[..., Any]]]] = {}
    for name in autopar.__all__:
        value = getattr(autopar, name)
        if inspect.isfunction(value):
            found[name] = [(name, value)]
        elif name in ("Mesh", "Plan"):
            methods = inspect.getmembers(value, inspect.isfunction)
            found[name] = [(name, value), *((f"{name}.{word}", one) for word, one in methods if word[0] != "_")]
    return found


@pytest.mark.parametrize("name", public_callables())
def test_examples_run(name: str) -> None:
    """One example after the other, in one namespace: a method's example goes on from that of its class."""
    namespace: dict[str, Any] = {}
    for title, value in public_callables()[name]:
        test = doctest.DocTestParser().get_doctest(inspect.getdoc(value) or "", namespace, title, None, None)
        assert test.examples, f"{title} has no example"
        report: list[str] = []
        failed, _ = doctest.DocTestRunner().run(test, out=report.append, clear_globs=False)
        assert not failed, "".join(report)
        namespace = test.globs


@pytest.mark.parametrize("name", public_callables())
def test_docstrings_have_the_sections(name: str) -> None:
    for title, value in public_callables()[name]:
        text = inspect.getdoc(value) or ""
        signature = inspect.signature(value)
        takes = [word for word in signature.parameters if word != "self"]
        sections: list[str] = []
        if inspect.isfunction(value) and takes:
            sections += ["Parameters:"] + ["Returns:"] * (signature.return_annotation != "None")
            for word in takes:
                named = re.search(rf"^ +{word}: ", text, re.MULTILINE)
                assert named, f"{title} does not document {word}"
        missing = [section for section in sections if section not in text.splitlines()]
        assert not missing, f"{title} lacks {missing}"
        assert re.match(r"[A-Z].*\.", text.partition("\n")[0]), f"{title} begins with no sentence"
