"""`autopar report PLAN -o report.html`: a plan as one page to look at."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from autopar.cli.asking import (
    Telling,
    add_question,
    add_target_option,
    asked_of,
    check_output,
    is_plan,
    meshes,
    read_plan,
    traced,
)
from autopar.errors import AutoparError

if TYPE_CHECKING:
    from autopar.search_plan import Asked
    from autopar.written.plan import Plan

__all__ = ["add_parser"]

EXAMPLES = """examples:
  autopar report gpt.plan.lay -o gpt.html
  autopar report examples/gpt.py:gpt --mesh dp=2,tp=2 --layout megatron --cluster h100 -o megatron.html

One file that needs no network: which dim goes where, the time of a step and its timeline, memory over the step, who
holds what, the model with what each op sends, and the strategies of experts beside it.
"""


def add_parser(subparsers: Any) -> None:
    """Add this command to the command line."""
    parser = subparsers.add_parser(
        "report",
        help="write a plan as one page to look at",
        description="Write a plan as one page to look at, in a browser.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("plan", metavar="PLAN", help="a plan's file, or a TARGET (with --mesh)")
    parser.add_argument("-o", "--output", metavar="FILE", required=True, help="where to write it, as in report.html")
    parser.add_argument("--layout", metavar="LAYOUT", help="for a TARGET: show this layout and not a searched plan")
    parser.add_argument("--time-limit", metavar="SECONDS", type=float, default=30.0, help="of a search (default: 30)")
    parser.add_argument("--no-experts", action="store_true", help="do not compare with the strategies of experts")
    add_target_option(parser)
    add_question(parser, mesh=False)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Read or plan, gather, write."""
    check_output(arguments.output)
    telling = Telling()
    telling.say("reading the plan" if arguments.plan.endswith(".lay") else f"tracing {arguments.plan}")
    asked = asked_of(arguments)
    plan = _plan(arguments, asked, telling)
    experts: dict[str, Plan] = {}
    if not arguments.no_experts:
        from autopar.written.experts import experts_beside

        telling.say("pricing the strategies of experts")
        experts = experts_beside(plan, asked)
    telling.done()
    from autopar.report.page import report

    report(plan, experts).save(arguments.output)
    print(f"written to {arguments.output}")
    return 0


def _plan(arguments: argparse.Namespace, asked: Asked, telling: Telling) -> Plan:
    from autopar.search_plan import plan_graph, under

    if is_plan(arguments.plan):
        return read_plan(arguments, arguments.plan)
    if arguments.mesh is None:
        raise AutoparError(f"on which mesh is {arguments.plan} planned?\nfix: --mesh dp=2,tp=4, or name a plan's file")
    possible = meshes(arguments)
    graph = traced(arguments, arguments.plan)
    if arguments.layout is not None:
        return under(graph, possible[0], arguments.layout, asked, arguments.layout)
    return plan_graph(graph, possible, None, asked, telling)
