"""`autopar verify TARGET --mesh AXES`: a plan on local processes beside the model on one."""

from __future__ import annotations

import argparse
import sys
import warnings
from math import inf, isfinite
from typing import TYPE_CHECKING, Any

from autopar.cli.json_output import add_json, print_data
from autopar.cli.parser import HelpText
from autopar.cli.plan_arguments import add_target
from autopar.cli.target import parse_dims, parse_settings
from autopar.errors import AutoparError, AutoparWarning, MeshError
from autopar.ir.precision import parse_precision
from autopar.mesh import Mesh

if TYPE_CHECKING:
    from autopar.cli.verify_processes import Verification

__all__ = ["add_parser"]

EXAMPLES = """examples:
  autopar verify examples/gpt.py:gpt --mesh dp=2,tp=2 --layout megatron
  autopar verify examples/hf.py:hf --set architecture=bert --mesh fsdp=2 --layout fsdp
  autopar verify examples/gpt.py:gpt --mesh rows=2 --layout "batch:rows"

Exit codes: 0 they agree, 1 they do not, 2 the command was wrong.
"""
SHOWN = 5
TOLERANCE = 1e-5
# Sums of other order round otherwise: eight times the distance of two neighbouring numbers.
HALF = {"bf16": 8 * 2.0**-7, "fp16": 8 * 2.0**-10}
# Each process loads torch and a part of the model: a thousand would exhaust the machine.
MOST_PROCESSES = 128


def add_parser(subparsers: Any) -> None:
    """Add this command to the command line."""
    parser = subparsers.add_parser(
        "verify",
        help="run a plan on local processes and compare it with the model on one",
        description="Run a plan on local processes and compare outputs, gradients and buffers with those of one.",
        epilog=EXAMPLES,
        formatter_class=HelpText,
    )
    add_target(parser)
    parser.add_argument("--mesh", required=True, metavar="AXES", help="as in dp=2,tp=2: a process for each rank")
    parser.add_argument("--layout", metavar="LAYOUT", help="a layout file, a strategy's name, or the text of a layout")
    parser.add_argument(
        "--precision",
        metavar="NAME",
        default="fp64",
        help="as in autopar plan; one process computes in the same dtypes (default: fp64, so that only mistakes "
        "differ; own: the dtypes of the model)",
    )
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        default="cpu",
        help="where the processes run; cuda: a GPU for each, over NCCL (default: cpu, over Gloo)",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        help=f"allowed relative difference (default: {TOLERANCE:g}; bf16: {HALF['bf16']:g}; fp16: {HALF['fp16']:g})",
    )
    parser.add_argument("--timeout", type=float, default=600, metavar="SECONDS", help="for all of it (default: 600)")
    parser.add_argument(
        "--as-initialised",
        action="store_true",
        help="leave parameters that are all zero so (default: they get small random values, the same on every rank, as "
        "a last projection of zeros makes outputs and gradients zero)",
    )
    add_json(parser, "verify")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run, compare, print."""
    mesh = Mesh(arguments.mesh)
    if mesh.is_open:
        raise MeshError(f"--mesh {arguments.mesh}: every axis needs a number of ranks here, as in dp=2,tp=2")
    mesh, layout = _of_replica(mesh, arguments.layout)
    if mesh.size > MOST_PROCESSES:
        raise MeshError(
            f"--mesh {arguments.mesh} is {mesh.size} processes on this machine, more than {MOST_PROCESSES}\n"
            "fix: verify on a smaller mesh with the same axes; what the ranks do is the same"
        )
    precision = parse_precision(arguments.precision)
    if precision.linears:
        raise AutoparError(
            f"--precision {arguments.precision}: one process multiplies in bf16, so float8 would differ\n"
            "fix: --precision bf16, which verifies the same plan"
        )
    if arguments.tolerance is None:
        arguments.tolerance = HALF.get(precision.compute, TOLERANCE)
    if not 0 <= arguments.tolerance < inf:
        raise AutoparError(f"--tolerance {arguments.tolerance:g}: expected a number from 0 up\nfix: as in 1e-5")
    if not 0 < arguments.timeout < inf:
        raise AutoparError(f"--timeout {arguments.timeout:g}: expected a number of seconds above 0")
    from autopar.cli.verify_processes import VerifyTask, verify

    task = VerifyTask(
        arguments.target,
        parse_settings(arguments.set),
        str(mesh),
        layout,
        parse_dims(arguments.dims),
        str(precision),
        arguments.device,
        not arguments.as_initialised,
    )
    progress = (lambda text: print(text, "...", file=sys.stderr)) if sys.stderr.isatty() else (lambda _: None)
    found = verify(task, mesh.size, arguments.timeout, progress)
    for text in found.warnings:
        warnings.warn(text, AutoparWarning, stacklevel=2)
    agree = found.worst.relative <= arguments.tolerance
    if arguments.json:
        print_data("verify", _plain(arguments, found, agree))
        return 0 if agree else 1
    under = f" under {arguments.layout}" if arguments.layout else ""
    verdict = "They agree" if agree else "They do NOT agree"
    print(f"{verdict}: relative differences from one process, {arguments.tolerance:.0e} allowed.")
    print(f"{arguments.target} on {arguments.mesh}{under}: {mesh.size} processes, {found.collectives} collectives")
    _print_differences(found)
    if layout != arguments.layout:
        print(f"One replica was compared, on {mesh}: meetings of replicas are no part of a call.")
    return 0 if agree else 1


def _print_differences(found: Verification) -> None:
    width = max(len(one.name) for one in found.differences[:SHOWN])
    for one in found.differences[:SHOWN]:
        print(f"  {one.name:{width}}  {one.reason or f'{one.relative:.1e}'}")
    if len(found.differences) > SHOWN:
        print(f"  and {len(found.differences) - SHOWN} more, no larger")
    if found.imbalances:
        from autopar.sharding.sharding import ROUTING_IMBALANCE

        op, busiest = max(found.imbalances.items(), key=lambda one: one[1])
        print(f"{op} had {busiest:.2f} times the mean of rows on the busiest rank; plans assume {ROUTING_IMBALANCE}.")
    if found.zeros:
        compared = sum(not one.name.startswith("buffer") for one in found.differences)
        print(f"{found.zeros} of {compared} outputs and gradients are zero on both sides, which shows nothing.")


def _of_replica(mesh: Mesh, layout: str | None) -> tuple[Mesh, str | None]:
    """Return the mesh and the layout of one replica, where a layout has replicas that drift."""
    if layout is None:
        return mesh, None
    from autopar.sharding.layout.language import choose_layout
    from autopar.sharding.replicas import split_replicas

    inner, drift = split_replicas(choose_layout(layout, mesh.whole), mesh)
    return (mesh, layout) if drift is None else (drift.replica_mesh, str(inner))


def _plain(arguments: argparse.Namespace, found: Verification, agree: bool) -> dict[str, Any]:
    return {
        "target": arguments.target,
        "mesh": arguments.mesh,
        "layout": arguments.layout,
        "precision": arguments.precision,
        "tolerance": arguments.tolerance,
        "agree": agree,
        "collectives": found.collectives,
        "zeros": found.zeros,
        "imbalances": dict(found.imbalances),
        "differences": [
            # JSON has no infinity: null where two tensors cannot be compared.
            {"name": one.name, "relative": one.relative if isfinite(one.relative) else None, "reason": one.reason}
            for one in found.differences
        ],
    }
