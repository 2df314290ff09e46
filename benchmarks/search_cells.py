"""Cells of the benchmark of the search: one model on one mesh within one limit on memory, its row and its targets."""

from __future__ import annotations

import gc
import json
import math
import time
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autopar
from autopar.cost.hardware.cluster import Cluster
from autopar.errors import AutoparError
from autopar.ir.graph import NamedGraph
from autopar.ir.precision import OWN, Precision
from autopar.mesh import Mesh
from autopar.sharding.options import TrainingOptions
from autopar.solver.infeasible import NoFeasiblePlan
from autopar.solver.solve import SolvedPlan, solve_plan

FREE, LEAST = "free", "least"
# Limits that all plans and no plan fit in.
FREE_BYTES, NO_BYTES = 2.0**50, 1.0

# Targets by the number of axes: search / export, and the gap without a limit on memory.
SEARCH_TARGETS = {1: 1.0, 2: 1.0, 3: 3.0, 4: 6.0}
GAP_TARGETS = {1: 0.005, 2: 0.005, 3: 0.02, 4: 0.05}
# Targets of the gap under a limit, and up to this factor of the least memory.
LIMITED_GAP, NARROW, NARROW_GAP = 0.03, 1.1, 0.10

HEAD = (
    f"{'model':>13} {'layers':>6} {'mesh':>24} {'memory':>6} {'limit GiB':>9} {'nodes':>6} {'variables':>9} "
    f"{'search s':>8} {'/ export':>8} {'target':>6} {'gap %':>7} {'target':>6} {'step ms':>9} {'GiB':>7} holds"
)


@dataclass(frozen=True)
class Cell:
    """Problem of a search."""

    model: str
    layers: int
    batch: int
    # A preset, or the dtype of a model that is trained in its own.
    precision: str
    mesh: str
    # `free`, `least`, a factor of the least memory as in `1.1x`, or GiB.
    memory: str
    cluster: str

    @property
    def problem(self) -> tuple[str, int, int, str]:
        """Return what the traced model depends on."""
        return self.model, self.layers, self.batch, self.precision

    @property
    def axes(self) -> int:
        return len(Mesh(self.mesh).names)

    @property
    def factor(self) -> float | None:
        """Return the limit on memory as a factor of the least; None if it is not given by one."""
        return float(self.memory[:-1]) if self.memory.endswith("x") else None

    @property
    def search_target(self) -> float:
        return SEARCH_TARGETS[min(self.axes, max(SEARCH_TARGETS))]

    @property
    def gap_target(self) -> float:
        if self.memory == FREE:
            return GAP_TARGETS[min(self.axes, max(GAP_TARGETS))]
        return NARROW_GAP if self.factor is not None and self.factor <= NARROW else LIMITED_GAP


@dataclass(frozen=True)
class Row:
    """Result of a cell; with an error, there is no plan. The peak of `least` is the least memory that was found."""

    cell: Cell
    error: str = ""
    nodes: int = 0
    export_seconds: float = math.nan
    search_seconds: float = math.nan
    wall_seconds: float = math.nan
    time_limit: float = math.nan
    limit_bytes: float = math.nan
    variables: int = 0
    gap: float = math.nan
    step_seconds: float = math.nan
    peak_bytes: float = math.nan

    @property
    def share(self) -> float:
        """Return the search / the export."""
        return self.search_seconds / self.export_seconds

    @property
    def holds(self) -> bool:
        """Return whether gap and search are within their targets."""
        return not self.error and self.gap <= self.cell.gap_target and self.share <= self.cell.search_target

    def __str__(self) -> str:
        cell = self.cell
        begin = f"{cell.model:>13} {cell.layers:6} {cell.mesh:>24} {cell.memory:>6}"
        if self.error:
            return f"{begin} {self.error}"
        limit = "-" if cell.memory in (FREE, LEAST) else f"{self.limit_bytes / 2**30:.2f}"
        begin += f" {limit:>9} {self.nodes:6}"
        spent, peak = f"{self.search_seconds:8.2f} {self.share:8.2f}", f"{self.peak_bytes / 2**30:7.2f}"
        if cell.memory == LEAST:
            return f"{begin} {'':9} {spent} {'':6} {'':7} {'':6} {'':9} {peak}"
        return (
            f"{begin} {self.variables:9} {spent} {cell.search_target:6.1f} {100 * self.gap:7.3f} "
            f"{100 * cell.gap_target:6.1f} {1e3 * self.step_seconds:9.2f} {peak} {'yes' if self.holds else 'no'}"
        )


@dataclass
class Results:
    """Rows by cell, and the file that keeps them."""

    path: Path | None = None
    rows: dict[Cell, Row] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path | None) -> Results:
        """Return the results of a file, none if there is no file yet."""
        if path is None or not path.exists():
            return cls(path)
        read = json.loads(path.read_text(encoding="utf-8"))
        rows = (Row(**{**row, "cell": Cell(**row["cell"])}) for row in read)
        return cls(path, {row.cell: row for row in rows})

    def add(self, row: Row) -> None:
        """Add a row, and write the file so that an interrupted run leaves a whole one."""
        self.rows[row.cell] = row
        if self.path is not None:
            part = self.path.with_name(f"{self.path.name}.part")
            rows = [_known(asdict(each)) for each in self.rows.values()]
            part.write_text(json.dumps(rows, indent=1), encoding="utf-8")
            part.replace(self.path)


def _known(row: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a row without NaN, which JSON lacks."""
    return {name: value for name, value in row.items() if value == value}


@dataclass(frozen=True)
class TracedModel:
    """Graph of a model, options of its training, and the seconds of its bare export."""

    graph: NamedGraph
    options: TrainingOptions
    export_seconds: float

    @classmethod
    def of(
        cls, model: nn.Module, inputs: dict[str, torch.Tensor], precision: Precision, export_seconds: float
    ) -> TracedModel:
        options = TrainingOptions() if precision == OWN else TrainingOptions("loss", precision=precision)
        graph = autopar.trace(model, inputs, precision=precision)
        _ = graph.footprints
        return cls(graph, options, export_seconds)


@dataclass(frozen=True)
class SearchSetting:
    """Setting of all cells of a run."""

    cluster: Cluster
    time_limit: float
    # Published strategies are priced too.
    strategies: bool = False


def exported_seconds(model: nn.Module, inputs: dict[str, torch.Tensor]) -> float:
    """Return the processor seconds of a bare export, which every tool on top of it needs."""
    gc.collect()
    begin = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        torch.export.export(model, (), inputs, strict=False).run_decompositions({})
    return time.process_time() - begin


def error_text(error: Exception) -> str:
    """Return the first line of an error, with its class unless the message is meant for users."""
    first = next(iter(str(error).splitlines()), "")
    return first if isinstance(error, AutoparError) else f"{type(error).__name__}: {first}"


def run_cell(cell: Cell, traced: TracedModel, results: Results, setting: SearchSetting) -> Row:
    """Search the plan of a cell; find the least memory first where the limit is a factor of it."""
    if cell.factor is None:
        given = {FREE: FREE_BYTES, LEAST: NO_BYTES}.get(cell.memory)
        return _searched(cell, traced, setting, float(cell.memory) * 2**30 if given is None else given)
    of_least = replace(cell, memory=LEAST)
    least = results.rows.get(of_least)
    if least is None:
        least = run_cell(of_least, traced, results, setting)
        results.add(least)
        print(least, flush=True)
    if least.error:
        return Row(cell, f"the least memory is not known: {least.error}")
    return _searched(cell, traced, setting, cell.factor * least.peak_bytes)


def _searched(cell: Cell, traced: TracedModel, setting: SearchSetting, limit_bytes: float) -> Row:
    gc.collect()
    began, began_wall = time.process_time(), time.monotonic()
    found: SolvedPlan | Exception
    try:
        found = solve_plan(
            traced.graph,
            Mesh(cell.mesh).whole,
            setting.cluster,
            memory_bytes=limit_bytes,
            options=traced.options,
            strategies=setting.strategies,
            time_limit=setting.time_limit,
        )
    except Exception as error:  # noqa: BLE001  # the row shows it, and other cells follow
        found = error
    row = Row(
        cell,
        nodes=len(traced.graph.nodes),
        export_seconds=traced.export_seconds,
        search_seconds=time.process_time() - began,
        wall_seconds=time.monotonic() - began_wall,
        time_limit=setting.time_limit,
        limit_bytes=limit_bytes,
    )
    if isinstance(found, SolvedPlan):
        costs = found.costs
        return replace(
            row,
            variables=found.variables,
            gap=found.gap,
            step_seconds=costs.step_seconds,
            peak_bytes=costs.limited_bytes,
        )
    if cell.memory == LEAST and isinstance(found, NoFeasiblePlan) and found.least_bytes is not None:
        return replace(row, peak_bytes=found.least_bytes)
    return replace(row, error=error_text(found))


def summary_of(rows: Iterable[Row]) -> str:
    """Return how many cells hold, by the number of axes and the limit on memory."""
    run: Counter[tuple[int, str]] = Counter()
    held: Counter[tuple[int, str]] = Counter()
    for row in rows:
        group = row.cell.axes, row.cell.memory
        run[group] += 1
        held[group] += row.holds
    parts = [
        f"{axes} {'axis' if axes == 1 else 'axes'}, {memory}: {held[axes, memory]} of {count}"
        for (axes, memory), count in sorted(run.items(), key=lambda item: item[0][0])
    ]
    return f"{held.total()} of {run.total()} cells hold ({'; '.join(parts)})"
