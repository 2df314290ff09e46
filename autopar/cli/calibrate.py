"""`autopar calibrate`: measure the machine at hand and write its cluster file."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.cli.parser import HelpText
from autopar.cost.hardware.cluster import cluster_path
from autopar.cost.hardware.toml_reader import measure_of, parse_quantity
from autopar.errors import AutoparError
from autopar.files import write_text

if TYPE_CHECKING:
    from autopar.cost.calibration.fit import Measurements
    from autopar.cost.calibration.measure import MeasuringBudget, Tick

__all__ = ["add_parser"]

EXAMPLES = """examples:
  autopar calibrate --output mine.toml
  autopar calibrate --tables --output mine.toml
  autopar calibrate --processes 8 --largest "4 MiB" --output mine.toml
  autopar calibrate --processes 1 --like h100 --output mine.toml
  torchrun --nproc-per-node 8 -m autopar calibrate --output mine.toml
"""
GPU_LARGEST, CPU_LARGEST = "1 GiB", "16 MiB"
CPU_PROCESSES = 4


def add_parser(subparsers: Any) -> None:
    """Add this command to the command line."""
    parser = subparsers.add_parser(
        "calibrate",
        help="measure this machine and write its cluster file",
        description="Measure products of matrices, memory, the start of an op and every collective, fit the cost model "
        "to the times, write a cluster file, and say how well it holds on sizes that were not fitted. Under torchrun "
        "the processes are those of the launch; alone, one is started for each GPU, or --processes of them.",
        epilog=EXAMPLES,
        formatter_class=HelpText,
    )
    parser.add_argument("--output", metavar="FILE", required=True, type=Path, help="the TOML file to write")
    parser.add_argument("--name", help="the name of the cluster (default: that of the file)")
    parser.add_argument("--processes", metavar="N", type=int, help=f"without GPUs (default: {CPU_PROCESSES})")
    parser.add_argument("--largest", metavar="SIZE", help=f"buffer ({GPU_LARGEST} on GPUs, {CPU_LARGEST} on CPUs)")
    parser.add_argument("--seconds", metavar="S", type=float, default=0.2, help="for each measurement (default: 0.2)")
    parser.add_argument("--like", metavar="CLUSTER", help="for one process: whose links and library to take")
    parser.add_argument("--tables", action="store_true", help="measure tables of times too, and write them beside FILE")
    parser.add_argument("--times", metavar="CSV", type=Path, help="where to write every collective's time")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, fit, write, judge."""
    largest = _bytes(arguments.largest) if arguments.largest else None
    _check(arguments)
    if "WORLD_SIZE" in os.environ and "RANK" in os.environ:
        _rank(arguments, largest)
        return 0
    import torch
    from torch.multiprocessing.spawn import spawn

    count = torch.cuda.device_count() if torch.cuda.is_available() else arguments.processes or CPU_PROCESSES
    # One process has no collectives to measure.
    if count < 2:
        _alone(arguments)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        given = (arguments, largest, count, Path(folder, "meeting"))
        spawn(_started, given, nprocs=count)  # type: ignore[no-untyped-call]
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Check the options before minutes of measuring."""
    if arguments.processes is not None and arguments.processes < 1:
        raise AutoparError(f"--processes {arguments.processes}: expected a whole number from 1 up")
    if not 0 < arguments.seconds < inf:
        raise AutoparError(f"--seconds {arguments.seconds:g}: expected a number of seconds above 0")
    if arguments.like is not None:
        cluster_path(arguments.like)


def _alone(arguments: argparse.Namespace) -> None:
    """Measure one process and take the links of another cluster."""
    if arguments.like is None:
        raise AutoparError(
            "1 process has no links to measure\n"
            "fix: take those of a cluster that you name with --like; or measure more processes, on a CPU with "
            "--processes 2 or more, on machines with a GPU each under torchrun"
        )
    from autopar.cost.calibration.measure import MeasuringBudget, measure, steps_of
    from autopar.cost.hardware.describe import links_of

    links = links_of(arguments.like)
    on_gpu = _on_gpu()
    budget = MeasuringBudget(0, 8192 if on_gpu else 1024, arguments.seconds, arguments.tables)
    with _progress(steps_of(budget, 1, 1), True) as tick:
        found = measure(budget, tick)
    _write(arguments, found, budget, f"links of {arguments.like}", links)


def _on_gpu() -> bool:
    import torch

    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    return torch.cuda.is_available()


def _bytes(text: str) -> int:
    measured = measure_of("largest_bytes")
    assert measured is not None, "a size"
    quantity = parse_quantity(text, measured[0])
    if isinstance(quantity, str):
        raise AutoparError(f"--largest: {quantity}\nfix: as in {measured[0].example}")
    return int(quantity.value)


def _started(rank: int, arguments: argparse.Namespace, largest: int | None, count: int, meeting: Path) -> None:
    """Run a process that this command started itself, without torchrun."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    _rank(arguments, largest, meeting)


def _rank(arguments: argparse.Namespace, largest: int | None, meeting: Path | None = None) -> None:
    import torch
    import torch.distributed as dist

    from autopar.cost.calibration.measure import MeasuringBudget, measure, steps_of
    from autopar.lowering.collectives.process_groups import join_local_group

    on_gpu = _on_gpu()
    # Before the process group: NCCL takes the current device of the process.
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    backend = "nccl" if on_gpu else "gloo"
    if meeting is None:
        dist.init_process_group(backend)
    else:
        join_local_group(meeting, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), backend)
    try:
        size = largest or _bytes(GPU_LARGEST if on_gpu else CPU_LARGEST)
        budget = MeasuringBudget(size, 8192 if on_gpu else 1024, arguments.seconds, arguments.tables)
        ranks, inside = dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        first = dist.get_rank() == 0
        with _progress(steps_of(budget, ranks, inside), first) as tick:
            found = measure(budget, tick)
        if first:
            _write(arguments, found, budget, dist.get_backend())
    finally:
        dist.destroy_process_group()


@contextmanager
def _progress(steps: int, first: bool) -> Iterator[Tick]:
    """Show a progress bar on the first rank, if stderr is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, quiet=not (first and sys.stderr.isatty()))
    columns = (BarColumn(), TextColumn("{task.completed:.0f} of {task.total:.0f}"), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=console) as progress:
        task = progress.add_task("", total=steps)

        def tick(text: str) -> None:
            progress.update(task, advance=1, description=text)

        yield tick


def _write(
    arguments: argparse.Namespace,
    found: Measurements,
    budget: MeasuringBudget,
    backend: str,
    links: tuple[list[str], list[str]] = ([], []),
) -> None:
    import torch

    from autopar.cost.calibration.fit import fit_collectives, fit_products
    from autopar.cost.calibration.write_cluster import cluster_text, times_table
    from autopar.cost.hardware.cluster import shipped_for

    shipped = None if found.own_host else shipped_for(found.device, found.memory_bytes)
    device = None if shipped is None else shipped.device
    products = fit_products(found.products, device, found.stream_bytes_per_second)
    fits = fit_collectives(found.collectives)
    how = f"autopar calibrate: {found.ranks} ranks, {backend}, torch {torch.__version__.split('+')[0]}, "
    how += f"buffers up to {budget.largest_bytes} bytes, " if found.collectives else ""
    how += "medians of the faster half of the repetitions, means of collectives where ranks share cores"
    name = arguments.name or arguments.output.stem
    nodes = f"{found.nodes} nodes with " if found.nodes > 1 else ""
    where = f" on {os.cpu_count()} cores" if found.device.startswith("CPU") else ""
    description = f"Measured: {nodes}{found.ranks_per_node} × {found.device}{where}, {backend}"
    tables = _write_tables(arguments.output, found) if arguments.tables else {}
    text = cluster_text(name, description, found, products, fits, date.today().isoformat(), how, links, shipped, tables)
    write_text(arguments.output, text)
    if arguments.times is not None:
        write_text(arguments.times, times_table(found.collectives))
    if shipped is not None:
        print(f"what cannot be measured is as in {shipped.name}: [inherited] in the file")
    print("\n".join(f"wrote {path}" for path in (arguments.output, *tables.values())))
    _print_errors(arguments.output, found)


def _write_tables(output: Path, found: Measurements) -> dict[str, str]:
    """Write the tables of measured times beside a cluster file; return their names by their place in it."""
    from autopar.cost.calibration.measured_tables import measured_rows
    from autopar.cost.measured.tables import table_text

    files = {}
    places = ("device.tables.products", "device.tables.attention", "library.tables.collectives")
    tables: tuple[Sequence[Any], ...] = measured_rows(found)
    for place, rows in zip(places, tables, strict=True):
        if rows:
            path = output.with_name(f"{output.stem}-{place.rpartition('.')[2]}.csv")
            write_text(path, table_text(rows))
            files[place] = path.name
    return files


def _print_errors(output: Path, found: Measurements) -> None:
    """Print the errors of the formulas, and those of tables without the measurements that were left out of the fit."""
    from autopar.cost.calibration.measured_tables import errors_of, measured_rows, with_tables, without_tables
    from autopar.cost.hardware.cluster import load_cluster

    cluster = load_cluster(output)
    formulas = errors_of(without_tables(cluster), found)
    has_tables = cluster.device.tables.products is not None
    tables = errors_of(with_tables(cluster, measured_rows(found, fitted_only=True)), found) if has_tables else {}
    print("\nmedian |error| of the file's prices")
    print(f"  {'':16} {'fitted':>8} {'not fitted':>11}" + (f" {'by tables':>10}" if has_tables else ""))
    for kind, (inside, outside) in formulas.items():
        errors = [inside, outside, *([tables[kind][1]] if has_tables else [])]
        shown = ["" if error is None else f"{error:.0%}" for error in errors]
        line = f"  {kind:16} {shown[0]:>8} {shown[1]:>11}" + "".join(f" {one:>10}" for one in shown[2:])
        print(line.rstrip())
    sys.stdout.flush()
