"""`autopar explain PLAN NAME`: reasons for the sharding of a tensor or op, and costs of alternatives."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from autopar.cli.json_output import add_json, print_data
from autopar.cli.parser import HelpText
from autopar.cli.plan_arguments import ProgressLine, add_plan, load_or_plan
from autopar.errors import AutoparError

if TYPE_CHECKING:
    from autopar.plans.plan import Plan

__all__ = ["add_parser"]

EXAMPLES = """examples:
  autopar explain gpt.plan.lay blocks.0.up.weight --trust-target
  autopar explain gpt.plan.lay blocks.0.up.weight --target examples/gpt.py:gpt --why-not "d_ff -> dp"
  autopar explain examples/gpt.py:gpt blocks.0/add --mesh dp=2,tp=2 --layout megatron
"""


def add_parser(subparsers: Any) -> None:
    """Add this command to the command line."""
    parser = subparsers.add_parser(
        "explain",
        help="explain the sharding of a tensor or the choice of an op, and price alternatives",
        description="Print the lines of the plan that decide, the rule of the op, its choice, its collectives; then "
        "alternatives, each priced with the rest of the plan unchanged. With --why-not, search the best plan with "
        "other rules for the tensor and for the tensors at the same place of the other layers.",
        epilog=EXAMPLES,
        formatter_class=HelpText,
    )
    add_plan(parser, "explain")
    parser.add_argument("name", metavar="NAME", help="name of a tensor or an op")
    parser.add_argument("--why-not", metavar="RULES", help='search again with the tensor pinned: "d_ff -> dp"')
    parser.add_argument("--one-layer", action="store_true", help="--why-not pins the tensor of this layer alone")
    parser.add_argument("--no-alternatives", action="store_true", help="do not price alternatives")
    add_json(parser, "explain")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Read or make a plan and explain a name in it."""
    from autopar.plans.format import repeated_names
    from autopar.plans.views.alternatives import shown
    from autopar.plans.views.explain import explain_name
    from autopar.plans.views.to_json import explanation_data, short_data

    progress = ProgressLine()
    progress.say("reading the plan" if arguments.plan.endswith(".lay") else f"tracing {arguments.plan}")
    plan = load_or_plan(arguments, progress)
    progress.say(f"explaining {arguments.name}")
    found = explain_name(plan, arguments.name)
    asked = None if arguments.why_not is None else _asked(plan, arguments)
    progress.say("pricing alternatives")
    others = () if arguments.no_alternatives else plan.alternatives(arguments.name)
    progress.say("searching again" if asked is not None else "")
    forced = None if asked is None else _forced(plan, asked, arguments, progress)
    progress.done()
    if arguments.json:
        why_not = forced and {
            "rules": arguments.why_not,
            "tensors": list(forced.names),
            "found": forced.plan is not None,
            **short_data(forced.plan),
            "why": forced.why or None,
        }
        said = explanation_data(found, others)
        print_data("explain", {"name": arguments.name, **short_data(plan), **said, "why_not": why_not})
        return 0
    print(found)
    if not arguments.no_alternatives:
        print(f"\n{shown(plan, others, len(repeated_names(plan.graph, arguments.name)))}")
    if forced is not None:
        print(f"\n{_beside(plan, forced, arguments.why_not)}")
    return 0


@dataclass(frozen=True)
class _Forced:
    """Best plan with the tensors pinned, or the reason why there is none."""

    names: tuple[str, ...]
    plan: Plan | None
    why: str = ""


def _asked(plan: Plan, arguments: argparse.Namespace) -> tuple[tuple[str, ...], Any]:
    """Return the tensors and pins of --why-not; errors appear before anything is priced."""
    from autopar.plans.format import repeated_names
    from autopar.sharding.layout.check import check_layout
    from autopar.sharding.layout.language import parse_layout
    from autopar.sharding.op_pins import words_of

    if arguments.name not in plan.graph.tensors:
        raise AutoparError(f"'{arguments.name}' is an op, and --why-not pins a tensor\nfix: name its result")
    names = (arguments.name,) if arguments.one_layer else repeated_names(plan.graph, arguments.name)
    layout = parse_layout("\n".join(f"@{name}[{arguments.why_not}]" for name in names), "--why-not")
    check_layout(layout, words_of(plan.graph), plan.decided.axes)
    return names, layout


def _forced(
    plan: Plan, asked: tuple[tuple[str, ...], Any], arguments: argparse.Namespace, progress: ProgressLine
) -> _Forced:
    from autopar.plans.find import plan_graph, request_like
    from autopar.solver.infeasible import NoFeasiblePlan

    names, layout = asked
    try:
        found = plan_graph(plan.graph, (plan.mesh,), layout, request_like(plan, arguments.time_limit), progress)
    except NoFeasiblePlan as error:
        return _Forced(names, None, str(error))
    return _Forced(names, found)


def _beside(plan: Plan, forced: _Forced, rules: str) -> str:
    from autopar.plans.views.summary import side_by_side

    first, *_, last = (forced.names[0], *forced.names)
    of = f"{first} ... {last}, {len(forced.names)} alike" if first != last else first
    if forced.plan is None:
        return f"no plan is feasible with {rules} of {of}: {forced.why}"
    beside = side_by_side({"this plan": plan, rules: replace(forced.plan, origin="")})
    return f"why not {rules} of {of}: the best plan with it, all else searched again\n\n{beside}"
