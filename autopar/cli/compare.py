"""`autopar compare A B ...`: plans, strategies and layouts side by side."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from autopar.cli.asking import add_question, add_target_option, asked_of, is_plan, meshes, read_plan, traced
from autopar.errors import AutoparError

if TYPE_CHECKING:
    from autopar.tracing.graph import NamedGraph
    from autopar.written.plan import Plan

__all__ = ["add_parser"]

EXAMPLES = """examples:
  autopar compare old.plan.lay new.plan.lay
  autopar compare gpt.plan.lay megatron fsdp_tp(fsdp=dp)
  autopar compare ddp fsdp(fsdp=dp*tp) --target examples/gpt.py:gpt --mesh dp=2,tp=2

Without --target and --mesh they are those of the first plan.
"""


def add_parser(subparsers: Any) -> None:
    """Add this command to the command line."""
    parser = subparsers.add_parser(
        "compare",
        help="put plans, strategies and layouts side by side",
        description="What each costs, what it sends, and which tensors lie otherwise than in the first.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("plans", metavar="PLAN", nargs="+", help="a plan's file, a strategy, a .lay file, or text")
    add_target_option(parser)
    add_question(parser, mesh=False)
    parser.add_argument("--json", action="store_true", help="print plain data, for programs")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Read, price, print."""
    plans = plans_of(arguments, arguments.plans)
    if arguments.json:
        from autopar.written.compare import differences
        from autopar.written.data import costs_data

        first = next(iter(plans.values()))
        data = [
            {"plan": name, **costs_data(plan), "differs": {k: list(v) for k, v in differences(first, plan).items()}}
            for name, plan in plans.items()
        ]
        print(json.dumps(data, indent=1))
        return 0
    from autopar.written.compare import side_by_side

    print(side_by_side(plans))
    return 0


def plans_of(arguments: argparse.Namespace, words: list[str]) -> dict[str, Plan]:
    """Each word as a plan for one graph."""
    from autopar.search_plan import under

    saved = [word for word in words if is_plan(word)]
    first = None
    graph: NamedGraph | None = None
    if arguments.target_of_plan is not None:
        asked_of(arguments)
        graph = traced(arguments, arguments.target_of_plan)
    if saved:
        first = read_plan(arguments, saved[0], graph)
        graph = first.graph
    if graph is None or (first is None and arguments.mesh is None):
        raise AutoparError(
            "which model, on which mesh?\nfix: --target file.py:function --mesh dp=2,tp=4, or name a plan's file"
        )
    found: dict[str, Plan] = {}
    mesh = meshes(arguments)[0] if arguments.mesh is not None else first.mesh if first is not None else None
    assert mesh is not None
    asked = asked_of(arguments)
    if first is not None and arguments.cluster is None:
        from dataclasses import replace

        asked = replace(asked, cluster=first.cluster, memory=asked.memory or first.limit_bytes)
    for word in words:
        if word in saved:
            found[word] = first if first is not None and word == saved[0] else read_plan(arguments, word, graph)
        else:
            found[word] = under(graph, mesh, word, asked, word)
    return found
