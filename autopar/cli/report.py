"""`autopar report PLAN -o report.html`: a plan as one page to look at."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from autopar.cli.parser import HelpText
from autopar.cli.plan_arguments import ProgressLine, add_plan, is_plan, load_or_plan

if TYPE_CHECKING:
    from autopar.plans.plan import Plan

__all__ = ["add_parser"]

EXAMPLES = """examples:
  autopar report gpt.plan.lay --target examples/gpt.py:gpt -o gpt.html
  autopar report examples/gpt.py:gpt --mesh dp=2,tp=2 --layout megatron --cluster h100 -o megatron.html

One file that needs no network: splits of dims, step time and timeline, memory over the step, shards by device, the
model with the collectives of each op, and published strategies for comparison.
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
    progress.done()
    from autopar.plans.views.page import report

    report(plan, experts).save(arguments.output)
    print(f"written to {arguments.output}")
    return 0
