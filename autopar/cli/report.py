"""`autopar report PLAN -o report.html`: a plan as one page to look at."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from autopar.cli.parser import HelpText
from autopar.cli.plan_arguments import ProgressLine, add_plan, is_plan, load_or_plan, read_plan

if TYPE_CHECKING:
    from autopar.plans.plan import Plan

__all__ = ["add_parser"]

EXAMPLES = """examples:
  autopar report gpt.plan.lay --target examples/gpt.py:gpt -o gpt.html
  autopar report examples/gpt.py:gpt --mesh dp=2,tp=2 --layout megatron --cluster h100 -o megatron.html
  autopar report new.plan.lay --beside old.plan.lay --beside ddp --target examples/gpt.py:gpt -o new.html

One file that needs no network: splits of dims, step time and timeline, stages, memory over the step, shards by device,
the model with the collectives of each op, published strategies for comparison, and other plans side by side.
"""


def add_parser(subparsers: Any) -> None:
    """Add this command to the command line."""
    parser = subparsers.add_parser(
        "report",
        help="write a plan as one page to look at",
        description="Write a plan as one page to look at, in a browser.",
        epilog=EXAMPLES,
        formatter_class=HelpText,
    )
    add_plan(parser, "show")
    parser.add_argument("-o", "--output", metavar="FILE", required=True, help="where to write it, as in report.html")
    parser.add_argument("--no-experts", action="store_true", help="do not compare with published strategies")
    parser.add_argument(
        "--beside",
        metavar="PLAN",
        action="append",
        default=[],
        help="a plan's file, a strategy, a .lay file or text to show side by side; give it once for each",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Read or make a plan and write its page."""
    progress = ProgressLine()
    progress.say("reading the plan" if arguments.plan.endswith(".lay") else f"tracing {arguments.plan}")
    plan = load_or_plan(arguments, progress)
    experts: dict[str, Plan] = {}
    if not arguments.no_experts:
        from autopar.plans.strategies import faster_strategy, price_strategies

        progress.say("pricing published strategies")
        experts = price_strategies(plan)
        if arguments.layout is None and not is_plan(arguments.plan):
            plan = faster_strategy(plan, experts)
    beside = {word: _other(arguments, plan, word) for word in arguments.beside}
    progress.done()
    from autopar.plans.views.page import report

    report(plan, experts, beside).save(arguments.output)
    print(f"written to {arguments.output}")
    return 0


def _other(arguments: argparse.Namespace, plan: Plan, word: str) -> Plan:
    """Return the plan of a file, or of a layout on the mesh of `plan`."""
    from autopar.plans.find import plan_under_layout, request_like

    if is_plan(word):
        if not is_plan(arguments.plan):
            arguments.target_of_plan = arguments.plan
        return read_plan(arguments, word, plan)
    return plan_under_layout(plan.graph, plan.mesh, word, request_like(plan), word)
