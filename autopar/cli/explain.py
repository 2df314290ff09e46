"""`autopar explain PLAN NAME`: why a tensor or an op lies as it does, and what another layout of it would cost."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autopar.cli.asking import add_plan, planned
from autopar.errors import AutoparError

if TYPE_CHECKING:
    from autopar.written.plan import Plan

__all__ = ["add_parser"]

EXAMPLES = """examples:
  autopar explain gpt.plan.lay blocks.0.up.weight
  autopar explain gpt.plan.lay blocks.0.up.weight --why-not "d_ff -> dp"
  autopar explain examples/gpt.py:gpt blocks.0/add --mesh dp=2,tp=2 --layout megatron
"""


def add_parser(subparsers: Any) -> None:
    """Add this command to the command line."""
    parser = subparsers.add_parser(
        "explain",
        help="why a tensor or an op of a plan lies as it does",
        description="The lines of the plan that say so, the rule of the op, its choice, what is sent for it; with "
        "--why-not, what the best plan costs in which it lies otherwise.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_plan(parser, "explain")
    parser.add_argument("name", metavar="NAME", help="of a tensor or an op")
    parser.add_argument("--why-not", metavar="RULES", help='search again with the tensor pinned: "d_ff -> dp"')
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Read or plan, explain."""
    plan = planned(arguments)
    print(plan.explain(arguments.name))
    if arguments.why_not is not None:
        print(f"\n{_why_not(plan, arguments)}")
    return 0


def _why_not(plan: Plan, arguments: argparse.Namespace) -> str:
    """The best plan with the tensor pinned."""
    from autopar.layout.language import parse_layout
    from autopar.planning.errors import NoPlan
    from autopar.search_plan import Asked, plan_graph
    from autopar.written.compare import side_by_side

    if arguments.name not in plan.graph.tensors:
        raise AutoparError(f"'{arguments.name}' is an op, and --why-not pins a tensor\nfix: name its result")
    layout = parse_layout(f"@{arguments.name}[{arguments.why_not}]", "--why-not")
    asked = Asked(
        plan.cluster,
        plan.limit_bytes,
        plan.decided.optimizer,
        plan.decided.outputs,
        plan.decided.local_inputs,
        arguments.time_limit,
    )
    try:
        forced = plan_graph(plan.graph, (plan.mesh,), layout, asked)
    except NoPlan as error:
        return f"with {arguments.why_not} there is no plan: {error}"
    return side_by_side({"as it is": plan, arguments.why_not: replace(forced, origin="")})
