"""`autopar compare A B ...`: plans, strategies and layouts side by side."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autopar.cli.json_output import add_json, print_data
from autopar.cli.parser import HelpText
from autopar.cli.plan_arguments import (
    INFEASIBLE,
    add_request,
    add_target_option,
    is_plan,
    meshes,
    read_plan,
    request_of,
    target_of,
    trace_target,
)
from autopar.errors import AutoparError, AutoparWarning, LayoutError

if TYPE_CHECKING:
    from autopar.ir.graph import NamedGraph
    from autopar.plans.plan import Plan

__all__ = ["add_parser"]

EXAMPLES = """examples:
  autopar compare old.plan.lay new.plan.lay --target examples/gpt.py:gpt
  autopar compare gpt.plan.lay megatron "fsdp_tp(fsdp=dp)" --trust-target
  autopar compare ddp "fsdp(fsdp=dp*tp)" --target examples/gpt.py:gpt --mesh dp=2,tp=2

Without --mesh the mesh is that of the first plan; with --trust-target the model is, too. Infeasible layouts are listed
with their reasons, and the others are compared.
Exit codes: 0, 1 (all are infeasible), 2 (the command was wrong).
"""


def add_parser(subparsers: Any) -> None:
    """Add this command to the command line."""
    parser = subparsers.add_parser(
        "compare",
        help="put plans, strategies and layouts side by side",
        description="Compare costs, communication, and the tensors that are sharded differently from the first plan.",
        epilog=EXAMPLES,
        formatter_class=HelpText,
    )
    parser.add_argument("plans", metavar="PLAN", nargs="+", help="a plan's file, a strategy, a .lay file, or text")
    add_target_option(parser)
    add_request(parser, mesh=False)
    add_json(parser, "compare")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Read, price and print the plans; return 1 if none is feasible."""
    plans = plans_of(arguments, arguments.plans)
    priced = {name: plan for name, plan in plans.items() if not isinstance(plan, str)}
    refused = {name: why for name, why in plans.items() if isinstance(why, str)}
    if arguments.json:
        print_data("compare", _data(plans))
        return 0 if priced else 1
    from autopar.plans.views.summary import side_by_side

    if priced:
        print(side_by_side(priced))
    for name, why in refused.items():
        print(f"{chr(10) if priced else ''}{name} is infeasible here: {why}")
    return 0 if priced else 1


def _data(plans: Mapping[str, Plan | str]) -> dict[str, Any]:
    from autopar.plans.views.confidence import within_noise_of
    from autopar.plans.views.summary import differences
    from autopar.plans.views.to_json import costs_data

    first = next((plan for plan in plans.values() if not isinstance(plan, str)), None)
    found: list[dict[str, Any]] = []
    for name, plan in plans.items():
        if isinstance(plan, str):
            found.append({"plan": name, "applies": False, "why": plan})
            continue
        assert first is not None
        differs = {tensor: list(pair) for tensor, pair in differences(first, plan).items()}
        near = within_noise_of(first, plan)
        found.append({"plan": name, "applies": True, **costs_data(plan), "within_noise": near, "differs": differs})
    about: dict[str, Any] = {"model": None, "mesh": None, "cluster": None}
    if first is not None:
        about = {
            "model": type(first.graph.model).__name__,
            "mesh": dict(first.decided.axes),
            "cluster": first.cluster.name,
        }
    return {**about, "plans": found}


def plans_of(arguments: argparse.Namespace, words: list[str]) -> dict[str, Plan | str]:
    """Return a plan for each word on one graph, or the reason why it is infeasible."""
    from autopar.plans.find import plan_under_layout, request_like

    saved = [word for word in words if is_plan(word)]
    first, request = None, request_of(arguments)
    graph: NamedGraph | None = None
    if saved:
        first = read_plan(arguments, saved[0])
        graph = first.graph
    elif arguments.target_of_plan is not None:
        graph = trace_target(arguments, arguments.target_of_plan)
    if graph is None or (first is None and arguments.mesh is None):
        raise AutoparError(
            "no model or no mesh: expected both\nfix: --target file.py:function --mesh dp=2,tp=4, or name a plan's file"
        )
    found: dict[str, Plan | str] = {}
    mesh = meshes(arguments)[0] if arguments.mesh is not None else first.mesh if first is not None else None
    assert mesh is not None
    if first is not None:  # the others take its request, changed by the options of this call
        given = {word: value for word, value in vars(arguments).items() if value is not None}
        named = (word for word in ("optimizer", "offload_states", "outputs", "precision") if word in given)
        options = {word: getattr(request.options, word) for word in named}
        places = {word: given[word] for word in ("cluster", "memory") if word in given}
        request = request_like(first)
        request = replace(request, **places, options=replace(request.options, **options))
        if request.options.precision != first.decided.options.precision and len(saved) < len(words):
            graph = trace_target(arguments, target_of(arguments, saved[0]), request.options.precision)
    for word in words:
        if word in saved:
            found[word] = first if first is not None and word == saved[0] else read_plan(arguments, word, first)
        else:
            try:
                found[word] = made = plan_under_layout(graph, mesh, word, request, word)
                for sentence in made.left_whole:
                    warnings.warn(sentence, AutoparWarning, stacklevel=2)
            except LayoutError as error:
                if error.code not in INFEASIBLE:
                    raise
                # An infeasible layout is a result of the comparison, not a failure of the command.
                found[word] = str(error)
    return found
