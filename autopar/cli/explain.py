"""`autopar explain PLAN NAME`: why a tensor or an op lies as it does, and what another layout of it would cost."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autopar.cli.asking import add_question, add_target_option, asked_of, is_plan, meshes, read_plan, traced
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
    parser.add_argument("plan", metavar="PLAN", help="a plan's file, or a TARGET (with --mesh)")
    parser.add_argument("name", metavar="NAME", help="of a tensor or an op")
    parser.add_argument("--why-not", metavar="RULES", help='search again with the tensor pinned: "d_ff -> dp"')
    parser.add_argument("--layout", metavar="LAYOUT", help="for a TARGET: explain this layout and not a searched plan")
    parser.add_argument("--time-limit", metavar="SECONDS", type=float, default=30.0, help="of a search (default: 30)")
    add_target_option(parser)
    add_question(parser, mesh=False)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Read or plan, explain."""
    plan = _plan(arguments)
    print(plan.explain(arguments.name))
    if arguments.why_not is not None:
        print(f"\n{_why_not(plan, arguments)}")
    return 0


def _plan(arguments: argparse.Namespace) -> Plan:
    from autopar.search_plan import plan_graph, under

    if is_plan(arguments.plan):
        return read_plan(arguments, arguments.plan)
    if arguments.mesh is None:
        raise AutoparError(f"on which mesh is {arguments.plan} planned?\nfix: --mesh dp=2,tp=4, or name a plan's file")
    possible, asked = meshes(arguments), asked_of(arguments)
    graph = traced(arguments, arguments.plan)
    if arguments.layout is not None:
        return under(graph, possible[0], arguments.layout, asked, arguments.layout)
    return plan_graph(graph, possible, None, asked)


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
