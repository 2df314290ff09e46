"""Training scripts of public projects, each with the edits that make it small and those that make it parallel.

    python -m tests.scripts.scripts --fetch                  # clone the projects, at the commits named in scripts.toml
    python -m tests.scripts.scripts [NAME ...]               # run the scripts on one process and on two, compare losses

`scripts.toml` describes each script; its text stays in its project. An edit is a pair: a piece of the script, and what
takes its place.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Script", "all_scripts", "changed_lines", "compared"]

HERE = Path(__file__).parent
CHECKOUTS = HERE.parents[1] / "build" / "scripts"
STEPS = 20
TOLERANCE = 1e-4
Edits = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Script:
    name: str
    repository: str
    commit: str
    path: str
    arguments: str = ""
    # Edits that make it small: sizes, steps, data that is drawn.
    small: Edits = ()
    # Edits that a user makes: `import autopar` and what follows from it.
    parallel: Edits = ()
    # Files that the script reads, and their text.
    files: Mapping[str, str] = field(default_factory=dict)
    # Files of drawn words, for models of language.
    words: Sequence[str] = ()
    # Words of the error of a script that cannot run.
    refused: str = ""
    # In single precision some losses are chaotic: rounding is amplified from step to step.
    dtype: str = "float32"

    @property
    def checkout(self) -> Path:
        return CHECKOUTS / self.repository.replace("/", "+")


def all_scripts() -> dict[str, Script]:
    found: dict[str, Any] = tomllib.loads((HERE / "scripts.toml").read_text(encoding="utf-8"))
    projects: dict[str, str] = found["commits"]
    made = [Script(commit=projects[one["repository"]], **one) for one in found["script"]]
    return {one.name: one for one in made}


def edited(text: str, edits: Edits) -> str:
    """Return a text with each first piece replaced, which has to be there once."""
    for old, new in edits:
        if text.count(old) != 1:
            raise ValueError(f"{old!r} is there {text.count(old)} times, not once")
        text = text.replace(old, new)
    return text


def drawn_words(lines: int = 1200) -> str:
    """Return lines of words."""
    draw = random.Random(0)
    words = ("model", "reads", "text", "and", "learns", "which", "words", "follow", "other", "ones")
    return "\n".join(" ".join(draw.choices(words, k=12)) for _ in range(lines)) + "\n"


def changed_lines(before: str, after: str) -> int:
    """Return how many lines of the second text are not in the first, or are gone from it."""
    new = gone = 0
    for line in difflib.ndiff(before.splitlines(), after.splitlines()):
        new += line.startswith("+ ")
        gone += line.startswith("- ")
    return max(new, gone)


@dataclass(frozen=True)
class Compared:
    lines: int
    one: list[float]
    two: list[float]
    error: str = ""

    def verdict(self, script: Script) -> str:
        if script.refused:
            return "refused" if script.refused in self.error else "NOT REFUSED"
        return "equal" if self.difference <= TOLERANCE else "DIFFERS"

    @property
    def difference(self) -> float:
        """The largest relative difference of a loss; infinite if there are other steps."""
        if self.error or not self.one or len(self.one) != len(self.two):
            return float("inf")
        return max(abs(a - b) / max(abs(a), 1e-3) for a, b in zip(self.one, self.two, strict=True))


def compared(script: Script, ranks: int = 2, seconds: float = 300) -> Compared:
    """Run a script on one process, and with its edits on many."""
    with tempfile.TemporaryDirectory() as folder:
        places = []
        for place in ("one", "many"):
            target = Path(folder, place)
            shutil.copytree(script.checkout, target, ignore=shutil.ignore_patterns(".git"))
            for name, text in {**script.files, **dict.fromkeys(script.words, drawn_words())}.items():
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                (target / name).write_text(text)
            places.append(target / script.path)
        small = edited(places[0].read_text(encoding="utf-8"), script.small)
        parallel = edited(small, script.parallel)
        places[0].write_text(small, encoding="utf-8")
        places[1].write_text(parallel, encoding="utf-8")
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        one, error = _losses([sys.executable], Path(folder, "one"), script, seconds)
        if not error:
            two, error = _losses(launch, Path(folder, "many"), script, seconds)
        return Compared(changed_lines(small, parallel), one, [] if error else two, error)


def _losses(launch: Sequence[str], checkout: Path, script: Script, seconds: float) -> tuple[list[float], str]:
    path = checkout / script.path
    out = checkout / "losses.json"
    command = [*launch, str(HERE / "worker.py"), str(out), str(STEPS), script.dtype, path.name]
    command += script.arguments.split()
    imports = os.pathsep.join([str(checkout), os.environ.get("PYTHONPATH", "")])
    options: dict[str, Any] = {"cwd": path.parent, "env": {**os.environ, "PYTHONPATH": imports}, "timeout": seconds}
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    except subprocess.TimeoutExpired:
        return [], f"ran for more than {seconds:.0f} s"
    if ended.returncode:
        return [], ended.stderr[-6000:]
    found: list[float] = json.loads(out.read_text())
    return found, ""


def fetch() -> None:
    """Clone the projects of all scripts, each at its commit."""
    for script in all_scripts().values():
        if not script.checkout.exists():
            address = f"https://github.com/{script.repository}"
            subprocess.run(["git", "clone", "--quiet", address, str(script.checkout)], check=True)
            subprocess.run(["git", "-C", str(script.checkout), "checkout", "--quiet", script.commit], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--fetch", action="store_true")
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    if options.fetch:
        fetch()
        return
    scripts = all_scripts()
    for name in options.names or scripts:
        began = time.monotonic()
        found = compared(scripts[name], options.ranks)
        verdict = found.verdict(scripts[name])
        print(
            f"{name:32} {found.lines} lines  {len(found.one):2} steps  "
            f"{found.difference:8.1e}  {verdict}  {time.monotonic() - began:.0f} s",
            flush=True,
        )
        if verdict.isupper():
            print(found.error or f"{found.one}\n{found.two}")


if __name__ == "__main__":
    main()
