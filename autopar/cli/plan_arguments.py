"""Arguments that commands about plans share, and the values they give."""

from __future__ import annotations

import argparse
import shlex
import sys
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.cli.target import check_target, load_target, parse_dims, parse_settings
from autopar.cost.compute.optimizers import optimizer_of
from autopar.cost.hardware.cluster import load_cluster
from autopar.errors import AutoparError
from autopar.files import check_writable
from autopar.ir.precision import Precision, parse_precision
from autopar.mesh import Mesh, SubMesh
from autopar.sharding.layout.language import choose_layout, parse_memory

__all__ = [
    "INFEASIBLE",
    "PRECISION",
    "ProgressLine",
    "add_plan",
    "add_request",
    "add_target",
    "add_target_option",
    "check_words",
    "header_of",
    "is_plan",
    "load_or_plan",
    "meshes",
    "read_plan",
    "request_of",
    "target_of",
    "target_text",
    "trace_target",
]


if TYPE_CHECKING:
    from autopar.ir.graph import NamedGraph
    from autopar.mesh import Mesh
    from autopar.plans.find import PlanRequest
    from autopar.plans.header import Header
    from autopar.plans.plan import Plan
    from autopar.solver import Progress


PRECISION = (
    "fp32, bf16 (float32 weights, optimizer states and gradient sums), bf16-pure, fp16, fp64; or with fields, "
    "'bf16, reduce=bf16' (default: the dtypes of the model)"
)
# Codes of layouts that are infeasible (exit code 1); other codes are mistakes in the layout (2).
INFEASIBLE = ("E3", "E4", "E5", "E6", "E7")


def add_target(parser: argparse.ArgumentParser) -> None:
    """Add TARGET and the options that change its model."""
    parser.add_argument(
        "target",
        metavar="TARGET",
        help="file.py:function or package.module:function, returning (model, inputs)",
    )
    _add_settings(parser)


def add_target_option(parser: argparse.ArgumentParser) -> None:
    """Add the options that name or trust the TARGET of a plan's file: a file is data, and must not run code unasked."""
    named = parser.add_mutually_exclusive_group()
    named.add_argument("--target", dest="target_of_plan", metavar="TARGET", help="the model of a plan's file")
    named.add_argument(
        "--trust-target",
        action="store_true",
        help="import and call the TARGET that the plan's file names; only for files that you trust",
    )
    _add_settings(parser)


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="an argument for the function")
    parser.add_argument(
        "--dims",
        action="append",
        default=[],
        metavar="TENSOR=NAMES",
        help="names for dims of an input or parameter",
    )


def add_request(parser: argparse.ArgumentParser, mesh: bool = True) -> None:
    """Add the options of a request: mesh, devices, cluster, memory, optimizer, outputs."""
    parser.add_argument(
        "--mesh", metavar="AXES", required=mesh, help="as in dp=2,tp=4; '?' and open sizes, tp=?, need --devices"
    )
    parser.add_argument("--devices", metavar="N", type=int, help="number of devices of a mesh with open sizes")
    parser.add_argument(
        "--cluster", metavar="NAME", help="a cluster of `autopar clusters`, or a TOML file (default: this machine)"
    )
    parser.add_argument(
        "--memory", metavar="SIZE", help="memory limit per device, as in 70GiB or 100%% (default: 90%%)"
    )
    parser.add_argument("--optimizer", metavar="NAME", help="optimizer whose states count as memory (default: adamw)")
    parser.add_argument("--offload-states", action="store_true", default=None, help="have these states on the host")
    parser.add_argument("--precision", metavar="NAME", help=PRECISION)
    parser.add_argument(
        "--outputs",
        choices=("sharded", "full", "local", "local_sum", "loss"),
        help="form of the results (default: sharded)",
    )


def request_of(arguments: argparse.Namespace) -> PlanRequest:
    """Return the request of the command line, checked before anything is traced."""
    from autopar.plans.find import PlanRequest
    from autopar.sharding.options import TrainingOptions
    from autopar.solver.integer.choice import parse_solver

    request = PlanRequest(
        arguments.cluster,
        arguments.memory,
        TrainingOptions(
            outputs=arguments.outputs or "sharded",
            optimizer=arguments.optimizer or "adamw",
            offload_states=bool(getattr(arguments, "offload_states", None)),
            precision=parse_precision(arguments.precision),
        ),
        time_limit=getattr(arguments, "time_limit", 30.0),
        cache=not getattr(arguments, "no_cache", False),
        any_mesh=getattr(arguments, "mesh", None) == "?",
        solver=parse_solver(getattr(arguments, "solver", None) or "search"),
    )
    cluster = request.cluster_value()
    request.limit_bytes(cluster, None)
    from autopar.cost.compute.optimizers import check_optimizer

    check_optimizer(request.options.optimizer, request.options.offload_states)
    return request


def meshes(arguments: argparse.Namespace) -> tuple[Mesh, ...]:
    from autopar.plans.open_mesh import meshes_of

    return meshes_of(arguments.mesh, arguments.devices)


def target_text(arguments: argparse.Namespace) -> str:
    """Return TARGET with the options that change its model, as the head of a plan stores it."""
    changes = [word for setting in arguments.set for word in ("--set", setting)]
    changes += [word for names in arguments.dims for word in ("--dims", names)]
    return shlex.join([arguments.target, *changes])


def trace_target(
    arguments: argparse.Namespace, target: str | None = None, precision: Precision | None = None
) -> NamedGraph:
    """Return the graph of TARGET; `target` is the text of a plan's head."""
    name, changes = (arguments.target, []) if target is None else _words_of(target)
    said = {flag: [word for other, word in changes if other == flag] for flag in ("--set", "--dims")}
    settings = parse_settings(arguments.set or said["--set"])
    dims = parse_dims(arguments.dims or said["--dims"])
    model, inputs = load_target(name, settings)
    from autopar.tracing.trace import trace

    return trace(model, inputs, dims=dims, precision=arguments.precision if precision is None else precision)


def _words_of(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Return a TARGET and the options that change its model."""
    try:
        name, *words = shlex.split(text)
    except ValueError:
        return text, []
    return name, list(zip(words[::2], words[1::2], strict=False))


# -- plans in files


def add_plan(parser: argparse.ArgumentParser, what: str) -> None:
    """Add PLAN: a file, or a TARGET with the options of `load_or_plan`; `what` is the verb of the command."""
    parser.add_argument("plan", metavar="PLAN", help="a plan's file, or a TARGET (with --mesh)")
    parser.add_argument("--layout", metavar="LAYOUT", help=f"for a TARGET: {what} this layout and not a searched plan")
    parser.add_argument("--time-limit", metavar="SECONDS", type=float, default=30.0, help="of a search (default: 30)")
    add_target_option(parser)
    add_request(parser, mesh=False)


def load_or_plan(arguments: argparse.Namespace, progress: ProgressLine | None = None) -> Plan:
    """Return the plan of a file, or of a TARGET under a layout or by a search."""
    from autopar.plans.find import plan_graph, plan_under_layout

    if is_plan(arguments.plan):
        if arguments.precision is not None:
            raise AutoparError(
                f"--precision {arguments.precision}: {arguments.plan} is a plan, which has a precision of its own\n"
                "fix: leave it out, or name a TARGET and plan again"
            )
        return read_plan(arguments, arguments.plan)
    if arguments.mesh is None:
        raise AutoparError(
            f"no mesh for {arguments.plan}: expected --mesh\nfix: --mesh dp=2,tp=4, or name a plan's file"
        )
    possible, request = meshes(arguments), request_of(arguments)
    graph = trace_target(arguments, arguments.plan)
    if arguments.layout is not None:
        return plan_under_layout(graph, possible[0], arguments.layout, request, arguments.layout)
    return plan_graph(graph, possible, None, request, progress)


def header_of(path: str, text: str) -> Header:
    """Return the head of a plan's file."""
    from autopar.plans.header import read_header

    header = read_header(text, path)
    if header is None:
        raise AutoparError(
            f"{path} is no plan: expected the first line '# autopar plan'\n"
            "fix: write one with autopar plan TARGET -o FILE"
        )
    return header


def is_plan(word: str) -> bool:
    """Return True if a word of the command line is a plan's file."""
    if not word.endswith(".lay"):
        return False
    if not Path(word).is_file():
        raise AutoparError(
            f"there is no file {word}\nfix: write one with autopar plan TARGET --mesh dp=2,tp=4 -o {word}"
        )
    from autopar.sharding.layout.source import read_text

    # By content: layouts and plans have the same extension.
    return read_text(word).startswith("# autopar plan")


def read_plan(arguments: argparse.Namespace, path: str, like: Plan | None = None) -> Plan:
    """Return the plan of a file, for the given TARGET or the one in its head if the user trusts it.

    A plan `like` it, of the same precision, shares its graph.
    """
    from autopar.plans.plan import Plan
    from autopar.sharding.layout.source import read_text

    text = read_text(path)
    precision = header_of(path, text).options.precision
    if like is not None and like.decided.options.precision == precision:
        graph = like.graph
    else:
        graph = trace_target(arguments, target_of(arguments, path), precision)
    return Plan.read(text, graph, path, getattr(arguments, "cluster", None))


def target_of(arguments: argparse.Namespace, path: str) -> str:
    """Return the TARGET of a plan's file: that of the options, or of its head if the user trusts it."""
    # Tracing runs the TARGET, and a head can name any function of any module.
    from autopar.sharding.layout.source import SourceSpan, excerpts, read_text

    if arguments.target_of_plan is not None:
        return str(arguments.target_of_plan)
    text = read_text(path)
    header = header_of(path, text)
    if not header.target:
        raise AutoparError(f"{path} does not say which model it is for\nfix: --target file.py:function")
    if not arguments.trust_target:
        number, line = next(pair for pair in enumerate(text.splitlines(), 1) if pair[1].startswith("#   target "))
        message = f"{path} names the code of its model; a plan's file is data, and code that it names is not run"
        shown = excerpts(SourceSpan(path, number, line.index(header.target), line))
        fix = "name the model, --target file.py:function; or --trust-target, if you trust this file"
        raise AutoparError("\n".join([message, *shown, f"fix: {fix}"]))
    return str(header.target)


class ProgressLine:
    """Line of progress, shown if stderr is a terminal."""

    def __init__(self) -> None:
        # A log file gets no progress: the line is rewritten by control characters.
        self.shown = sys.stderr.isatty()

    def say(self, text: str) -> None:
        if self.shown:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def __call__(self, progress: Progress) -> None:
        cost = f"{progress.cost * 1e3:,.2f} ms" if progress.cost < float("inf") else "nothing yet"
        gap = f", gap {100 * progress.gap:.2f} %" if progress.gap < float("inf") else ""
        self.say(f"{progress.seconds:5.1f} s  {progress.stage}: {cost}{gap}")

    def done(self) -> None:
        if self.shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


# -- checks before torch is loaded -------------------------------------------------------------------------------------


def check_words(arguments: argparse.Namespace) -> None:
    """Raise for missing files and for malformed targets, meshes, layouts and clusters."""
    said = vars(arguments)
    for name in ("target", "target_of_plan"):
        if said.get(name) is not None:
            check_target(said[name])
    if "plan" in said and not is_plan(said["plan"]):
        if said["plan"].endswith(".lay"):
            raise AutoparError(
                f"{said['plan']} is a layout and no plan: its first line is not '# autopar plan'\n"
                f"fix: name a TARGET, with --mesh dp=2,tp=4 --layout {said['plan']}, or what autopar plan -o wrote"
            )
        check_target(said["plan"])
    parse_settings(said.get("set") or ())
    parse_dims(said.get("dims") or ())
    axes = _axes(said.get("mesh"))
    if said.get("cluster") is not None:
        load_cluster(said["cluster"])
    if said.get("memory") is not None:
        parse_memory(said["memory"])
    if said.get("optimizer") is not None:
        optimizer_of(said["optimizer"])
    if said.get("precision") is not None:
        parse_precision(said["precision"])
    limit = said.get("time_limit")
    if limit is not None and not 0 < limit < inf:
        raise AutoparError(f"--time-limit {limit:g}: expected a number of seconds above 0")
    _check_solver(said.get("solver"), said.get("write_model"))
    layout = said.get("layout")
    if layout == "":
        raise AutoparError("--layout: the layout is empty\nfix: leave --layout out, then all of it is searched")
    if layout is not None and axes is not None:
        choose_layout(layout, axes)
    for word in said.get("plans") or ():
        if word.rpartition(":")[0].endswith(".py"):
            raise AutoparError(
                f"{word} is a model, and PLAN a plan's file, a strategy or a layout\nfix: --target {word}"
            )
        if not is_plan(word) and axes is not None:
            choose_layout(word, axes)
    for name in ("output", "times"):
        if said.get(name) is not None:
            check_writable(said[name], f"--{name}")


def _check_solver(solver: str | None, path: str | None) -> None:
    if solver is None and path is None:
        return
    from autopar.solver.integer.choice import check_format, parse_solver

    if solver is not None:
        parse_solver(solver)
    if path is not None:
        check_format(path)
        check_writable(path, "--write-model")


def _axes(mesh: str | None) -> SubMesh | None:
    """Return the axes of a mesh if all sizes are known."""
    if mesh is None or mesh == "?":
        return None
    found = Mesh(mesh)
    return None if found.is_open else found.whole
