"""Measure the share of each architecture that the rule table covers: `python -m benchmarks.coverage [names...]`.

With no names, the standard architectures; `--all` for every architecture known to this benchmark; `--train` for the
graphs of training (with dropout); `--precision bf16` for those of half precision; `--json` for programs.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.table import Table

import autopar
from benchmarks.architectures import EVERY, REFUSED, REFUSED_IN_HALF, STANDARD
from examples.hf import hf


@dataclass(frozen=True)
class Row:
    """One architecture; `reason` says why it does not trace."""

    architecture: str
    mode: str
    nodes: int = 0
    table: int = 0
    discovered: int = 0
    replicated: int = 0
    seconds: float = 0.0
    reason: str | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coverage", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="ARCHITECTURE", help="a `model_type` of transformers")
    parser.add_argument("--all", action="store_true", help="every architecture known to this benchmark")
    parser.add_argument("--train", action="store_true", help="trace in training mode, with dropout")
    parser.add_argument("--precision", help="what the graphs compute in, as in autopar.trace")
    parser.add_argument("--json", action="store_true", help="one JSON list instead of a table")
    options = parser.parse_args(arguments)
    names = options.names or (EVERY if options.all else STANDARD)
    quiet_libraries()
    rows = []
    for name in names:
        rows.append(measure(name, options.train, options.precision))
        if not options.json:
            Console(stderr=True).print(f"{name}: {rows[-1].seconds:.1f} s", style="dim", highlight=False)
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        Console().print(as_table(rows))
        for row in rows:
            if row.reason is not None:
                print(f"{row.architecture} ({row.mode}) does not trace: {row.reason}")
    refused = REFUSED.keys() | (REFUSED_IN_HALF.keys() if options.precision else set())
    return 0 if all(row.reason is None or row.architecture in refused for row in rows) else 1


def measure(name: str, train: bool, precision: str | None = None) -> Row:
    """Trace one architecture and count where the rules of its nodes come from."""
    torch.manual_seed(0)
    mode = "train" if train else "eval"
    model, inputs = hf(name, train=train, dropout=0.1 if train else None)
    started = time.perf_counter()
    try:
        coverage = autopar.trace(model, inputs, precision=precision).coverage()
    except autopar.AutoparError as error:
        return Row(name, mode, seconds=time.perf_counter() - started, reason=" ".join(str(error).split()))
    seconds = time.perf_counter() - started
    nodes = sum(coverage.values())
    return Row(name, mode, nodes, coverage["table"], coverage["discovered"], coverage["replicated"], seconds)


def as_table(rows: Sequence[Row]) -> Table:
    table = Table(title="Where the rule of each node comes from")
    for heading in ("architecture", "mode"):
        table.add_column(heading, no_wrap=True)
    for heading in ("nodes", "table", "discovered", "replicated", "seconds"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        counts = ["-"] * 4 if row.reason else [str(row.nodes), str(row.table), str(row.discovered), str(row.replicated)]
        table.add_row(row.architecture, row.mode, *counts, f"{row.seconds:.1f}")
    traced = [row for row in rows if row.reason is None]
    totals = [sum(getattr(row, what) for row in traced) for what in ("nodes", "table", "discovered", "replicated")]
    table.add_section()
    table.add_row(f"{len(traced)} of {len(rows)}", "", *map(str, totals), f"{sum(row.seconds for row in rows):.1f}")
    return table


def quiet_libraries() -> None:
    """Small random configs make transformers warn about token ids and the like; the table is what counts here."""
    warnings.filterwarnings("ignore", module="transformers")
    warnings.filterwarnings("ignore", category=autopar.AutoparWarning)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    logging.getLogger("torch").setLevel(logging.CRITICAL)


if __name__ == "__main__":
    raise SystemExit(main())
