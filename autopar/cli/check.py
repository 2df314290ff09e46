"""`autopar check TARGET --layout FILE`: whether a layout, with its guards and limits, holds for a model. For CI."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autopar.cli.json_output import add_json, print_data
from autopar.cli.parser import HelpText
from autopar.cli.plan_arguments import (
    INFEASIBLE,
    ProgressLine,
    add_request,
    add_target,
    meshes,
    request_of,
    trace_target,
)
from autopar.errors import AutoparWarning, LayoutError, MeshError

if TYPE_CHECKING:
    from autopar.mesh import Mesh
    from autopar.plans.plan import Plan
    from autopar.sharding.layout.language import Layout
    from autopar.sharding.layout.source import SourceSpan

__all__ = ["add_parser"]

EXAMPLES = """examples:
  autopar check examples/gpt.py:gpt --layout megatron --mesh dp=2,tp=2
  autopar check examples/gpt.py:gpt --layout gpt.plan.lay --cluster h100
  autopar check examples/gpt.py:gpt --layout "batch -> dp; * -> none; limit memory 1GiB" --mesh dp=2

Exit codes: 0 (it holds), 1 (it does not: a guard, a limit, or an op that cannot), 2 (the command was wrong).
"""


def add_parser(subparsers: Any) -> None:
    """Add this command to the command line."""
    parser = subparsers.add_parser(
        "check",
        help="whether a layout's guards and limits hold for a model",
        description="Complete a layout for a model without running it: whether every op can do what it says, whether "
        "what it forbids is sent, whether it keeps its limits of memory and halo.",
        epilog=EXAMPLES,
        formatter_class=HelpText,
    )
    add_target(parser)
    parser.add_argument("--layout", metavar="LAYOUT", required=True, help="a .lay file, a strategy, or text")
    add_request(parser, mesh=False)
    add_json(parser, "check")
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class _Contract:
    """One contract of a layout, with its verdict."""

    text: str
    kind: str
    span: SourceSpan | None
    # None: the layout is not legal, so the contract cannot be checked.
    holds: bool | None
    why: str | None = None


def run(arguments: argparse.Namespace) -> int:
    """Complete the layout, check its contracts, print the verdict."""
    from autopar.plans.find import plan_under_layout
    from autopar.sharding.layout.language import choose_layout

    progress = ProgressLine()
    mesh = _mesh(arguments)
    request = request_of(arguments)
    layout = choose_layout(arguments.layout, mesh.whole)
    progress.say(f"tracing {arguments.target}")
    graph = trace_target(arguments)
    progress.say("checking")
    plan: Plan | None = None
    try:
        plan = plan_under_layout(graph, mesh, layout, request, arguments.layout)
        contracts = [_Contract("every op can do what the layout says", "legal", None, True), *_contracts(layout, plan)]
    except LayoutError as error:
        if error.code not in INFEASIBLE:
            raise
        contracts = [_Contract("every op can do what the layout says", "legal", None, False, str(error))]
        contracts += [_Contract(text, kind, span, None) for text, kind, span in _promises(layout)]
    progress.done()
    for sentence in () if plan is None else plan.left_whole:
        warnings.warn(sentence, AutoparWarning, stacklevel=2)
    holds = all(one.holds or one.kind == "warn" for one in contracts)
    if arguments.json:
        print_data("check", _data(arguments, mesh, request.cluster_value().name, contracts, plan))
    else:
        print(_text(contracts, plan))
    return 0 if holds else 1


def _promises(layout: Layout) -> Iterator[tuple[str, str, SourceSpan | None]]:
    """Yield the contracts of a layout except memory limits: text, kind, place."""
    from autopar.sharding.layout.syntax import Contract, print_statement

    for one in layout:
        if isinstance(one, Contract):
            yield print_statement(one), one.kind, one.span


def _contracts(layout: Layout, plan: Plan) -> Iterator[_Contract]:
    """Yield each contract checked alone, so that a broken one hides no other."""
    from autopar.cost.memory.peak import check_memory
    from autopar.plans.format import bytes_text
    from autopar.sharding.contracts import check_contracts
    from autopar.sharding.layout.language import Layout
    from autopar.sharding.layout.syntax import Contract
    from autopar.sharding.reshard_insertion import inserted_reshards

    decided = plan.decided
    sent = inserted_reshards(plan.graph, decided.assignment, decided.options.outputs, decided.options.local_inputs)
    statements = [one for one in layout if isinstance(one, Contract)]
    for one, (text, kind, span) in zip(statements, _promises(layout), strict=True):
        alone = Layout((one,), layout.name)
        why: str | None = None
        with warnings.catch_warnings(record=True) as caught:
            # A guard of kind `warn` reports by a warning, which Python shows only once by default.
            warnings.simplefilter("always", AutoparWarning)
            try:
                check_contracts(alone, plan.graph, decided.assignment, sent)
                check_memory(alone, plan.graph, decided, plan.cluster.device.memory_bytes)
            except LayoutError as error:
                why = str(error)
        why = why or next((str(each.message) for each in caught), None)
        yield _Contract(text, kind, span, why is None, why)
    has, peak = bytes_text(plan.limit_bytes), bytes_text(plan.memory_bytes)
    over = f"a device holds {peak} at {plan.costs.memory.peak_at}, more than {has}\nfix: split more, or allow more"
    yield _Contract(f"a device holds at most {has}", "memory", None, plan.fits, None if plan.fits else over)


# -- what is printed


def _text(contracts: list[_Contract], plan: Plan | None) -> str:
    """Return the verdict with the reasons of a no, then the list of contracts."""
    from autopar.plans.format import bytes_text, seconds_text, table

    broken = [one for one in contracts if one.holds is False and one.kind != "warn"]
    warned = [one for one in contracts if one.holds is False and one.kind == "warn"]
    lines: list[str] = []
    if not broken:
        assert plan is not None
        memory = f"{bytes_text(plan.memory_bytes)} of {bytes_text(plan.limit_bytes)}"
        lines.append(f"yes: step {seconds_text(plan.step_seconds)}, memory {memory} on {plan.cluster.name}")
    # What a limit of the layout says of memory need not be said again for the device.
    said = [one for one in broken if one.span is not None or one.kind == "legal"] or broken
    lines += [f"no: {one.why}" for one in said]
    lines += [f"warning: {one.why}" for one in warned]
    promised = [one for one in contracts if one.span is not None]
    if promised:
        words = {True: "holds", False: "broken", None: "not known"}
        lines += ["", *table([(words[one.holds], str(one.span), one.text) for one in promised])]
    return "\n".join(lines)


def _data(
    arguments: argparse.Namespace, mesh: Mesh, cluster: str, contracts: list[_Contract], plan: Plan | None
) -> dict[str, Any]:
    return {
        "target": arguments.target,
        "layout": arguments.layout,
        "mesh": mesh.whole,
        "cluster": cluster,
        "holds": all(one.holds or one.kind == "warn" for one in contracts),
        "contracts": [
            {
                "contract": one.text,
                "kind": one.kind,
                "line": None if one.span is None else str(one.span),
                "holds": one.holds,
                "why": one.why,
            }
            for one in contracts
        ],
        "step_seconds": None if plan is None else plan.step_seconds,
        "memory_bytes": None if plan is None else plan.memory_bytes,
        "limit_bytes": None if plan is None else plan.limit_bytes,
    }


def _mesh(arguments: argparse.Namespace) -> Mesh:
    from autopar.sharding.layout.language import Layout

    if arguments.mesh is not None:
        return meshes(arguments)[0]
    if arguments.layout.endswith(".lay"):
        mesh = Layout.load(arguments.layout).mesh
        if mesh is not None and not mesh.is_open:
            return mesh
    raise MeshError(
        "no mesh: expected --mesh or a mesh in the layout\nfix: --mesh dp=2,tp=4, or a 'mesh' line in the layout's file"
    )
