"""Errors of predicted step times, by kind of run: what measured runs took, of the times that were predicted for them.

`cost_models/errors/runs.csv` has a line for each kind of runs that were measured. `python -m benchmarks.published
--write-errors` writes it from one half of the published runs, and judges it by the other half; runs on CPUs are few,
and all count. A plan takes the line of its own kind. Where no run of this kind was measured it takes a line of more
kinds, and its range is extrapolated.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path

from autopar.errors import AutoparError
from autopar.files import data_folder

__all__ = [
    "ANY",
    "COVERED",
    "CPU",
    "RunKind",
    "StepErrors",
    "errors_of",
    "read_errors",
    "shipped_errors",
    "write_errors",
]

# Share of the measured runs that a range covers; as many lie below it as above it.
COVERED = 0.8
# Device of runs on processes of a CPU.
CPU = "CPU"
# Value of a field of a kind that has runs of every value.
ANY = "any"


@dataclass(frozen=True)
class RunKind:
    """Properties of a run by which its errors are known; `any` stands for all values of one."""

    # Its generation: `H100`.
    device: str
    # Of ranks that the innermost links join: `one` or `several`.
    nodes: str
    # Of a pipeline: `one` or `several`.
    stages: str
    # Width of the dtype of the products: `16`.
    bits: str

    def wider(self) -> Iterator[RunKind]:
        """Yield the kind, and those that leave out its device and its stages; of a CPU its stages alone."""
        for bits in (self.bits, ANY):
            narrow = replace(self, bits=bits)
            yield narrow
            # Processes of a CPU differ from accelerators in more than their errors.
            if self.device == CPU:
                yield replace(narrow, stages=ANY)
            else:
                yield replace(narrow, device=ANY)
                yield replace(narrow, device=ANY, stages=ANY)

    @property
    def text(self) -> str:
        """Return the kind in words: `H100, several nodes, no pipeline`."""
        device = "" if self.device == ANY else self.device
        nodes = "one node" if self.nodes == "one" else "several nodes"
        stages = {"one": "no pipeline", "several": "a pipeline"}.get(self.stages, "")
        return ", ".join(filter(None, (device, nodes, stages)))


@dataclass(frozen=True)
class StepErrors:
    """Errors of the predictions of the runs of one kind."""

    kind: RunKind
    runs: int
    # Of the largest run.
    devices: int
    # Measured over predicted times: 80 % of the runs lie between.
    low: float
    high: float
    # Ratio of two predicted times up to which the order of the two runs may be the other one, in 80 % of pairs.
    apart: float


def errors_of(kind: RunKind, known: Sequence[StepErrors]) -> StepErrors | None:
    """Return the errors of the narrowest kind that was measured; None if none was."""
    by_kind = {one.kind: one for one in known}
    return next((by_kind[one] for one in kind.wider() if one in by_kind), None)


# -- the file ----------------------------------------------------------------------------------------------------------

_KIND = tuple(field.name for field in fields(RunKind))
_NUMBERS = tuple(field.name for field in fields(StepErrors) if field.name != "kind")


@lru_cache(maxsize=1)
def shipped_errors() -> tuple[StepErrors, ...]:
    """Return the errors that autopar ships."""
    return read_errors(data_folder("cost_models") / "errors" / "runs.csv")


def read_errors(path: Path) -> tuple[StepErrors, ...]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return tuple(_read(row) for row in csv.DictReader(file))
    except (OSError, KeyError, ValueError) as problem:
        raise AutoparError(f"{path} cannot be read: {problem}\nfix: install autopar again") from None


def _read(row: dict[str, str]) -> StepErrors:
    numbers = (float(row[name]) for name in ("low", "high", "apart"))
    return StepErrors(RunKind(*(row[name] for name in _KIND)), int(row["runs"]), int(row["devices"]), *numbers)


def write_errors(path: Path, errors: Sequence[StepErrors]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow((*_KIND, *_NUMBERS))
        for one in errors:
            numbers = (f"{value:.3f}" for value in (one.low, one.high, one.apart))
            writer.writerow((*(getattr(one.kind, name) for name in _KIND), one.runs, one.devices, *numbers))
