"""The cost model beside published measurements.

    python -m benchmarks.published TABLE.csv ...           # a line for each table and each part of it
    python -m benchmarks.published --json TABLE.csv ...    # the same as JSON
    python -m benchmarks.published --rows TABLE.csv ...    # and every run

The file's name says which table it is; `--tables` lists those that are known. Every run is rebuilt: a model of its
sizes, traced without memory, its cluster, its strategy as a layout. Nothing is fitted to these tables.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autopar.cost.step_errors import read_errors, shipped_errors, write_errors
from autopar.errors import AutoparError
from benchmarks.published import attention, communication, cpu_steps, products
from benchmarks.published.errors import by_other_tables, errors_by_kind, held_back, kind_of, run_errors
from benchmarks.published.price import price
from benchmarks.published.priced import Priced, half_of
from benchmarks.published.readers.rows import read_rows
from benchmarks.published.tables import READERS, Judged, judge, reader_of
from benchmarks.published.traces import expect, few_collections

KNOWN = (*READERS, *cpu_steps.READERS, *communication.READERS, *products.READERS, *attention.READERS)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__.split("\n")[0])
    parser.add_argument("tables", nargs="*", type=Path, metavar="TABLE.csv")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--rows", action="store_true", help="print every run too")
    parser.add_argument(
        "--write-errors",
        type=Path,
        metavar="FILE.csv",
        help="write the errors of one half of the runs, and of all on CPUs, by kind of run",
    )
    parser.add_argument("--tables", dest="listed", action="store_true", help="list the tables that are known")
    given = parser.parse_args(arguments)
    if given.listed:
        print("\n".join(f"*{name}*.csv" for name in KNOWN))
        return 0
    tables = [path for path in given.tables if any(name in path.name for name in KNOWN)]
    unknown = [path for path in given.tables if path not in tables]
    try:
        if not tables:
            raise AutoparError(_which(unknown))
        if unknown:
            print(f"left out: {_which(unknown)}", file=sys.stderr)
        report = _report(tables, given.write_errors)
    except AutoparError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not given.rows:
        for table in report["runs"]:
            del table["priced"]
    print(json.dumps(report, indent=2) if given.json else _text(report))
    return 0


def _which(unknown: Sequence[Path]) -> str:
    names = ", ".join(path.name for path in unknown) or "nothing"
    return f"{names}: no table that is known by its name\nfix: one of {', '.join(f'*{name}*.csv' for name in KNOWN)}"


def _report(paths: Sequence[Path], errors_path: Path | None) -> dict[str, Any]:
    """Everything, as plain data."""
    tables: dict[str, list[Priced]] = {}
    with few_collections():
        for path in paths:
            reader = reader_of(path)
            if reader is not None:
                runs = reader(read_rows(path))
                expect(runs)
                tables[path.stem] = [price(run) for run in runs]
    every = [one for priced in tables.values() for one in priced]
    on_cpus = cpu_steps.cpu_errors(paths)
    if errors_path is not None:
        fit = run_errors(one for one in every if half_of(one.run) == "fit")
        write_errors(errors_path, errors_by_kind([*fit, *on_cpus]))
    known = shipped_errors() if errors_path is None else read_errors(errors_path)
    return {
        "runs": [
            {
                "table": name,
                "parts": [asdict(part) for part in judge(name, priced)],
                "priced": [_row(one) for one in priced],
            }
            for name, priced in tables.items()
        ],
        "ranges": [
            asdict(one) for one in (*held_back(tables, known), *by_other_tables(tables), *cpu_steps.judge(on_cpus))
        ],
        "collectives": [asdict(one) for one in communication.tables(paths)],
        "products": [asdict(one) for one in products.tables(paths)],
        "attention": [asdict(one) for one in attention.tables(paths)],
    }


def _row(one: Priced) -> dict[str, Any]:
    run = one.run
    return {
        "label": run.label,
        "group": run.group,
        "strategy": f"dp={run.dp} tp={run.tp} pp={run.pp} {run.sharding} {run.micro_batches} x {run.micro_batch}",
        "kind": kind_of(run).text,
        "half": half_of(run),
        "predicted_seconds": one.step_seconds,
        "measured_seconds": run.measured.step_seconds,
        "predicted_bytes": one.memory_bytes,
        "measured_bytes": run.measured.memory_bytes,
        "predicted_fits": one.fits,
        "measured_fits": run.measured.fits,
    }


# -- text -------------------------------------------------------------------------------------------------------------


def _text(report: dict[str, Any]) -> str:
    lines: list[str] = []
    for table in report["runs"]:
        lines += [_run_line(Judged(**part)) for part in table["parts"]]
        lines += [_row_line(row) for row in table.get("priced", ())]
    lines += [_range_line(one) for one in report["ranges"]]
    for one in (*report["collectives"], *report["products"], *report["attention"]):
        lines.append(
            f"{one['name']}: {one['rows']} rows, {one['left_out']} left out; median |error| "
            f"{_percent(one['large_error'])} of {one['large_rows']} large, "
            f"{_percent(one['small_error'])} of {one['small_rows']} small"
        )
    return "\n".join(lines)


def _run_line(part: Judged) -> str:
    words = [f"{part.name}: {part.rows} rows, {part.timed} with a time"]
    if part.tau is not None:
        words.append(f"tau {part.tau:.2f} ({part.tau_by_step:.2f} by step) in {part.groups} groups")
    if part.regret is not None:
        words.append(f"top-1 regret {_percent(part.regret)}")
    words.append(f"median |error| of time {_percent(part.time_error)}")
    if part.memory_error is not None:
        words.append(f"of memory {_percent(part.memory_error)}")
    for name, hits in (("does not fit", part.does_not_fit), ("every crash", part.crashes)):
        if hits is not None:
            found = hits if isinstance(hits, dict) else asdict(hits)
            shares = f"precision {_share(found['precision'])}, recall {_share(found['recall'])}"
            words.append(f"{name}: {shares} ({found['predicted']} predicted, {found['real']} real)")
    return "; ".join(words)


def _range_line(one: dict[str, Any]) -> str:
    order = f"; {_percent(one['in_order'])} of {one['pairs']} pairs beyond the noise in order" if one["pairs"] else ""
    return f"{one['name']}: {_percent(one['inside'])} of {one['runs']} runs inside{order}"


def _row_line(row: dict[str, Any]) -> str:
    time = f"{row['predicted_seconds'] * 1e3:.1f} ms"
    if row["measured_seconds"] is not None:
        time += f" of {row['measured_seconds'] * 1e3:.1f} ms ({row['predicted_seconds'] / row['measured_seconds']:.2f})"
    memory = ""
    if row["predicted_bytes"] is not None:
        memory = f", {row['predicted_bytes'] / 2**30:.1f} GiB"
        if row["measured_bytes"] is not None:
            memory += f" of {row['measured_bytes'] / 2**30:.1f} GiB"
    return f"  {row['label']}  {row['group']}  {row['strategy']}: {time}{memory}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.2f}"


if __name__ == "__main__":
    sys.exit(main())
