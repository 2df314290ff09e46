"""Steps of Gloo processes on a CPU, beside the predictions of `benchmarks.order --calibrate` on the same machine.

A calibrated cluster is of one machine, so its predictions stand in the table: nobody else can make them again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from autopar.cost.step_errors import CPU, RunKind
from benchmarks.published.errors import Covered, RunError, by_other_groups
from benchmarks.published.readers.rows import Row, read_rows

__all__ = ["READERS", "cpu_errors", "judge"]

# Parts of the file's name.
READERS = ("e2e_cpu_order",)
# Width of the floats of the models.
BITS = "32"


def cpu_errors(paths: Iterable[Path]) -> list[RunError]:
    """Return the errors of all such tables among some files."""
    return [_read(row) for path in paths if any(part in path.name for part in READERS) for row in read_rows(path)]


def judge(errors: Iterable[RunError]) -> list[Covered]:
    """Judge the range that the runs of each model get from those of the others."""
    by_model: dict[str, list[RunError]] = defaultdict(list)
    for one in errors:
        by_model[str(one.group[0])].append(one)
    return by_other_groups("ranges from all other models, CPU", by_model)


def _read(row: Row) -> RunError:
    stages = "several" if row.whole("stages") > 1 else "one"
    times = (row.number(f"{name}_milliseconds") / 1e3 for name in ("predicted", "measured"))
    return RunError(RunKind(CPU, "one", stages, BITS), (row.text("size"),), row.whole("ranks"), *times)
