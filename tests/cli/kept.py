"""Golden texts: what commands print, plain, but for what a cost model, a clock or the place on a disk changes."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["FOLDER", "masked", "same_as_kept"]

FOLDER = Path(__file__).parent / "golden"
ROOT = Path(__file__).parents[2]
# Times, shares, ratios, and bytes of memory: `3.12 ms`, `+360 us`, `0.04 %`, `× 1.06`, `1.35 MiB`, `2.3e-16`.
PREDICTED = re.compile(
    r"[+−-]?\d[\d.,]*(?:e[-+]?\d+)?(?: ?(?:us|ms|s|%|[KMGT]?i?B)(?![\w%])|(?<=e[-+]\d\d))|(?<=× )\d[\d.,]*"
)


def masked(text: str) -> str:
    """Without what is predicted or measured, and which differences are largest; counts and sizes of tensors stay."""
    shown = PREDICTED.sub("#", text.replace(str(ROOT), "."))
    shown = re.sub(r"^ +\d+\.\d(?=  +\w)", "  #", shown, flags=re.MULTILINE)  # seconds of a line of progress
    shown = re.sub(r"(strategies/\w+\.lay):\d+", r"\1:#", shown)  # strategies grow comments
    shown = re.sub(r"^ +(?=#|\| )", "  ", shown, flags=re.MULTILINE)  # as wide as a number, or as a place on the disk
    shown = re.sub(r"^  (gradient of|output|buffer) \S+ ", "  ...  ", shown, flags=re.MULTILINE)
    return "\n".join(re.sub(r"(?<=\S) {2,}", "  ", line).rstrip() for line in shown.splitlines()) + "\n"


def same_as_kept(name: str, text: str) -> None:
    """Compare with the golden text `name`; one that is not there is written, and the test fails once."""
    path = FOLDER / f"{name}.txt"
    found = masked(text)
    if not path.exists():
        path.write_text(found)
        raise AssertionError(f"{path} is new: read it, and keep it")
    assert found == path.read_text(), f"if this is meant, remove {path}, run again, and read the difference"
