"""Solve an instance of the contest on intra-operator parallelism (ASPLOS/EuroSys 2025).

python -m benchmarks.contest INSTANCE
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from autopar.cli.parser import HelpText
from autopar.cli.plan_arguments import check_words
from autopar.errors import AutoparError
from autopar.files import write_text
from autopar.names import printable
from autopar.solver import Progress
from benchmarks.contest.contest_format import read_problem
from benchmarks.contest.problem import ProblemError
from benchmarks.contest.solve import Solution, solve

EXAMPLES = """examples:
  python -m benchmarks.contest instance.json.gz
  python -m benchmarks.contest instance.json --time-limit 120 --seed 1 --output answer.json
"""

# A line of progress is printed when something changed, and at most once in this time.
PROGRESS_SECONDS = 1.0


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.contest",
        description="Choose a strategy per node of an instance (.json or .json.gz) at the least cost within its usage "
        "limit; prints the cost, a proved lower bound and the gap between them.",
        epilog=EXAMPLES,
        formatter_class=HelpText,
    )
    parser.add_argument("instance", metavar="INSTANCE", help="a file in the format of the IOPDDL contest")
    parser.add_argument(
        "--time-limit", type=float, default=60.0, metavar="SECONDS", help="reading the file included (default: 60)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random moves (default: 0)")
    parser.add_argument("--output", metavar="FILE", help='write {"solution": [...], "cost": ..., "bound": ...}')
    arguments = parser.parse_args(words)
    try:
        check_words(arguments)
        return run(arguments)
    except AutoparError as error:
        print(f"{parser.prog}: {printable(str(error))}", file=sys.stderr)
        return 2


def run(arguments: argparse.Namespace) -> int:
    """Read, solve, print, write; 1 when no solution was found."""
    began = time.monotonic()
    output = _checked(arguments)

    problem = read_problem(arguments.instance)
    print(
        f"{problem.name or arguments.instance}: {problem.node_count:,} nodes, "
        f"{sum(problem.strategy_counts):,} strategies, {len(problem.edges):,} edges, {len(problem.limits):,} limits",
        flush=True,
    )
    print("   seconds  stage                      cost                 bound       gap", flush=True)
    shown: list[Progress] = []

    def tell(progress: Progress) -> None:
        new = not shown or progress.stage != shown[-1].stage
        if new or progress.seconds - shown[-1].seconds >= PROGRESS_SECONDS:
            shown.append(progress)
            loaded = solving - began
            print(
                f"{progress.seconds + loaded:10.1f}  {progress.stage:10}{number(progress.cost):>20}  "
                f"{number(progress.bound):>20}  {percent(progress.gap):>8}",
                flush=True,
            )

    solving = time.monotonic()
    # The limit of the user includes reading, which takes seconds for large instances.
    solution = solve(problem, arguments.time_limit - (solving - began), arguments.seed, progress=tell)
    answer = {
        "solution": None if solution.strategies is None else list(solution.strategies),
        "cost": plain(solution.cost),
        "bound": plain(solution.bound),
    }
    if output is not None:
        write_text(output, json.dumps(answer) + "\n")
    seconds = time.monotonic() - began
    _print(solution, seconds)
    return 0 if solution.strategies is not None else 1


def _checked(arguments: argparse.Namespace) -> Path | None:
    """Return the path of the answer; raise for bad options before anything is read."""
    if arguments.seed < 0:
        raise ProblemError(f"--seed {arguments.seed}: expected a whole number from 0 up")
    if not arguments.instance:
        raise ProblemError("INSTANCE: the name of the file is empty\nfix: name an instance, as in instance.json.gz")
    return None if arguments.output is None else Path(arguments.output)


def _print(solution: Solution, seconds: float) -> None:
    if solution.strategies is None:
        reason = "there is none: proved" if solution.infeasible else "the time is up, and whether there is one is open"
        print(f"no solution in {seconds:.1f} s: {reason}", file=sys.stderr)
        return
    print(f"cost   {number(solution.cost)}")
    print(f"bound  {number(solution.bound)}")
    print(f"gap    {percent(solution.gap)}{', proved optimal' if solution.gap == 0 else ''}")
    print(f"time   {seconds:.1f} s")


def number(value: float) -> str:
    """Return a cost as text, whole numbers without decimals."""
    if not math.isfinite(value):
        return "-"
    return f"{int(value):,}" if value.is_integer() else f"{value:,.6g}" if abs(value) < 1e6 else f"{value:,.1f}"


def percent(gap: float) -> str:
    return f"{100 * gap:.4f} %" if math.isfinite(gap) else "-"


def plain(value: float) -> int | float | None:
    """Return a cost for JSON; null if there is none."""
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() else value


if __name__ == "__main__":
    sys.exit(main())
