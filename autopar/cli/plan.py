"""`autopar plan TARGET`: the best plan that is found for a model on a mesh."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autopar.cli.json_output import add_json, print_data
from autopar.cli.parser import HelpText
from autopar.cli.plan_arguments import (
    ProgressLine,
    add_request,
    add_target,
    meshes,
    request_of,
    target_text,
    trace_target,
)
from autopar.errors import AutoparError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autopar.ir.graph import NamedGraph
    from autopar.mesh import Mesh
    from autopar.plans.find import PlanRequest
    from autopar.plans.plan import Plan

__all__ = ["add_parser"]

EXAMPLES = """examples:
  autopar plan examples/gpt.py:gpt --mesh dp=2,tp=2
  autopar plan examples/llama3_8b.py:llama3_8b --set loss=True --mesh dp=8,tp=8 --cluster h100 -o llama.plan.lay
  autopar plan examples/llama3_8b.py:llama3_8b --mesh "?" --devices 64 --cluster h100 --memory 70GiB
  autopar plan examples/gpt.py:gpt --mesh dp=2,tp=2 --layout "batch -> dp" --json
  autopar plan examples/gpt.py:gpt --mesh dp=4 --solver ilp:scip
  autopar plan examples/gpt.py:gpt --mesh dp=4 --write-model gpt.mps

--json prints one object; --json-schema prints its schema. Exit codes: 0, 1 (no plan fits), 2 (the command was wrong).
"""


def add_parser(subparsers: Any) -> None:
    """Add this command to the command line."""
    parser = subparsers.add_parser(
        "plan",
        help="search the best plan for a model on a mesh and predict its costs",
        description="Search the best plan of a model on a mesh of devices: splits of dims, collectives, storage. "
        "Print the plan, its predicted time and memory, a bound on its distance from the best plan, and the costs of "
        "published strategies.",
        epilog=EXAMPLES,
        formatter_class=HelpText,
    )
    add_target(parser)
    add_request(parser)
    parser.add_argument(
        "--layout", metavar="LAYOUT", help="layout that the plan must follow: a .lay file, a strategy, or text"
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="write the plan, as in gpt.plan.lay")
    parser.add_argument(
        "--time-limit", metavar="SECONDS", type=float, default=30.0, help="seconds of search (default: 30)"
    )
    parser.add_argument(
        "--solver",
        metavar="NAME",
        help="who finds the plan and proves its bound: search (default); lp, the search with the bound of the linear "
        "relaxation, lp:highs, lp:glop, lp:pdlp; ilp, the integer program by OR-Tools, ilp:highs, ilp:scip, ilp:cp-sat",
    )
    parser.add_argument(
        "--write-model",
        metavar="FILE",
        help="write the integer program, as in plan.mps or plan.lp; without --solver, end there",
    )
    parser.add_argument("--no-cache", action="store_true", help="neither read nor write the cache of plans")
    parser.add_argument("--no-experts", action="store_true", help="do not compare with published strategies")
    add_json(parser, "plan")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Trace, search, print, write."""
    progress = ProgressLine()
    possible = meshes(arguments)
    request = request_of(arguments)
    progress.say(f"tracing {arguments.target}")
    graph = trace_target(arguments)
    if arguments.write_model is not None:
        _write_model(graph, possible, arguments, request)
        if arguments.solver is None:
            progress.done()
            return 0
    from autopar.plans.find import plan_graph
    from autopar.plans.strategies import faster_strategy
    from autopar.solver.infeasible import NoFeasiblePlan

    try:
        plan = plan_graph(graph, possible, arguments.layout, request, progress)
    except NoFeasiblePlan as error:
        progress.done()
        # A program that reads stdout gets no data: the reason goes to stderr.
        print(f"autopar plan: {error}", file=sys.stderr if arguments.json else sys.stdout)
        return 1
    plan = replace(plan, target=target_text(arguments))
    experts = {} if arguments.no_experts else _experts(plan, progress)
    # A strategy may violate the user's layout, so it replaces only a free search.
    if arguments.layout is None:
        plan = faster_strategy(plan, experts)
    progress.done()
    if arguments.output is not None:
        plan.save(arguments.output)
    if arguments.json:
        data = plan.to_json()
        data["experts"] = [_expert_data(name, expert, plan) for name, expert in experts.items()]
        print_data("plan", data)
        return 0
    print(plan.summary())
    if experts:
        print(f"\n{_comparison(plan, experts)}")
    if arguments.output is not None:
        print(f"\nwritten to {arguments.output}")
    return 0


def _write_model(
    graph: NamedGraph, possible: Sequence[Mesh], arguments: argparse.Namespace, request: PlanRequest
) -> None:
    """Write the integer program of the request, and say on stderr how large it is."""
    from autopar.plans.program import program_of
    from autopar.solver.integer.write_program import write_program

    if len(possible) > 1:
        raise AutoparError(
            f"--write-model {arguments.write_model}: a program has one mesh, and {len(possible)} are open\n"
            "fix: --mesh with all sizes, as in --mesh dp=2,tp=2"
        )
    made = program_of(graph, possible[0], arguments.layout, request)
    write_program(made, arguments.write_model)
    print(f"{arguments.write_model}: {made.program.counts}", file=sys.stderr)


def _experts(plan: Plan, progress: ProgressLine) -> dict[str, Plan]:
    from autopar.plans.strategies import price_strategies

    progress.say("pricing published strategies")
    return price_strategies(plan)


def _expert_data(name: str, expert: Plan, plan: Plan) -> dict[str, Any]:
    from autopar.plans.views.confidence import within_noise_of

    return {
        "strategy": name,
        "step_seconds": expert.step_seconds,
        "peak_bytes": expert.memory_bytes,
        "fits": expert.fits,
        "within_noise": within_noise_of(plan, expert),
    }


def _comparison(plan: Plan, experts: dict[str, Plan]) -> str:
    from autopar.plans.format import bytes_text, seconds_text, table
    from autopar.plans.views.confidence import noise_note

    rows = [("", "step", "", "memory", "fits")]
    every = {"this plan": plan, **experts}
    for name, one in every.items():
        slower = f"× {one.step_seconds / plan.step_seconds:.3g}" if one is not plan else ""
        fits = "yes" if one.fits else "no"
        rows.append((name, seconds_text(one.step_seconds), slower, bytes_text(one.memory_bytes), fits))
    return "\n".join(["published strategies on this mesh", *table(rows, right=(1, 2, 3)), *noise_note(every)])
