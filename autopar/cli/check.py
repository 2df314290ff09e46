"""`autopar check TARGET --layout FILE`: whether a layout, with its guards and limits, holds for a model. For CI."""

from __future__ import annotations

import argparse
import warnings
from typing import Any

from autopar.cli.asking import add_question, add_target, asked_of, meshes, traced
from autopar.errors import AutoparWarning, LayoutError

__all__ = ["add_parser"]

EXAMPLES = """examples:
  autopar check examples/gpt.py:gpt --layout megatron --mesh dp=2,tp=2
  autopar check examples/gpt.py:gpt --layout gpt.plan.lay --cluster h100
  autopar check examples/gpt.py:gpt --layout "batch -> dp; * -> none; limit memory 1GiB" --mesh dp=2

Exit codes: 0 (it holds), 1 (it does not: a guard, a limit, or an op that cannot), 2 (the question was wrong).
"""

NO = ("E3", "E4", "E5", "E6", "E7")


def add_parser(subparsers: Any) -> None:
    """Add this command to the command line."""
    parser = subparsers.add_parser(
        "check",
        help="whether a layout's guards and limits hold for a model",
        description="Complete a layout for a model without running it: whether every op can do what it says, whether "
        "what it forbids is sent, whether it keeps its limits of memory and halo.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_target(parser)
    parser.add_argument("--layout", metavar="LAYOUT", required=True, help="a .lay file, a strategy, or text")
    add_question(parser, mesh=False)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Complete, check, say."""
    from autopar.contracts import check_contracts
    from autopar.conversions import conversions
    from autopar.layout.choosing import choose_layout
    from autopar.search_plan import under
    from autopar.written.units import bytes_text, seconds_text

    mesh = _mesh(arguments)
    asked = asked_of(arguments)
    layout = choose_layout(arguments.layout, dict(zip(mesh.names, mesh.sizes, strict=True)))
    graph = traced(arguments)
    said: list[str] = []
    try:
        plan = under(graph, mesh, layout, asked, arguments.layout)
        decided = plan.decided
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", AutoparWarning)
            sent = conversions(graph, decided.decisions, decided.outputs, decided.local_inputs)
            check_contracts(layout, graph, decided.decisions, sent)
        said = [str(one.message) for one in caught]
    except LayoutError as error:
        if error.code not in NO:
            raise
        print(f"no: {error}")
        return 1
    for text in said:
        print(f"warning: {text}")
    if not plan.fits:
        print(
            f"no: a device holds {bytes_text(plan.memory_bytes)} at {plan.costs.memory.peak_at}, "
            f"more than {bytes_text(plan.limit_bytes)}\nfix: split more, or allow more"
        )
        return 1
    memory = f"{bytes_text(plan.memory_bytes)} of {bytes_text(plan.limit_bytes)}"
    print(f"yes: step {seconds_text(plan.step_seconds)}, memory {memory} on {plan.cluster.name}")
    return 0


def _mesh(arguments: argparse.Namespace) -> Any:
    from autopar.errors import MeshError
    from autopar.layout.language import Layout

    if arguments.mesh is not None:
        return meshes(arguments)[0]
    if arguments.layout.endswith(".lay"):
        mesh = Layout.load(arguments.layout).mesh
        if mesh is not None and not mesh.is_open:
            return mesh
    raise MeshError("on which mesh?\nfix: --mesh dp=2,tp=4, or a 'mesh' line in the layout's file")
