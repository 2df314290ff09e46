"""`autopar check TARGET --layout LAYOUT`: does a layout hold for a model? For people, and for their CI."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from typing import TYPE_CHECKING, Any

from autopar.cli.target import check_target, load_target, parse_dims, parse_settings
from autopar.errors import AutoparWarning, LayoutError, MeshError
from autopar.mesh import Mesh

if TYPE_CHECKING:
    from autopar.layout.language import Layout

__all__ = ["add_parser"]

EXAMPLES = """examples:
  autopar check examples/gpt.py:gpt --layout megatron_sp --mesh dp=2,tp=2
  autopar check examples/gpt.py:gpt --layout my.lay --cluster h100

The layout is carried out on paper, without processes: every tensor must have a layout, every op a choice, every
'forbid', 'same' and 'limit' must hold. Where 'limit memory' is a percentage it needs --cluster.

Exit codes: 0 it holds, 1 it does not, 2 the question was wrong.
"""

UNREADABLE = ("E0", "E1")
"""Errors of a layout that nobody can carry out, whatever the model can do."""


def add_parser(subparsers: Any) -> None:
    """Add this command to the command line."""
    parser = subparsers.add_parser(
        "check",
        help="say whether a layout holds for a model: legality, guards, limits",
        description="Say whether a layout holds for a model: legality, guards ('forbid', 'warn'), limits.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "target", metavar="TARGET", help="file.py:function or package.module:function, returning (model, inputs)"
    )
    parser.add_argument(
        "--layout", required=True, metavar="LAYOUT", help="a layout file, a strategy's name, or the text of a layout"
    )
    parser.add_argument("--mesh", metavar="AXES", help="as in dp=2,tp=2 (default: the layout's own 'mesh' line)")
    parser.add_argument("--cluster", metavar="CLUSTER", help="whose devices' memory percentages are of")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="an argument for the function")
    parser.add_argument("--dims", action="append", default=[], metavar="TENSOR=NAMES", help="names for the dims of one")
    parser.add_argument("--json", action="store_true", help="print plain data, for programs")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Trace, carry out, check, print."""
    check_target(arguments.target)
    settings, dims = parse_settings(arguments.set), parse_dims(arguments.dims)
    if arguments.mesh is not None:
        Mesh(arguments.mesh)
    if sys.stderr.isatty():
        print(f"tracing {arguments.target} ...", file=sys.stderr)
    from autopar.layout.choosing import choose_layout

    own = None
    if arguments.mesh is None:
        own = choose_layout(arguments.layout, {}).mesh
        if own is None:
            raise MeshError("on which mesh? fix: --mesh dp=2,tp=2, or a line 'mesh dp=2, tp=2' in the layout")
    mesh = own or Mesh(arguments.mesh)
    axes = {axis: size for axis, size in mesh.axes.items() if size is not None}
    if len(axes) < len(mesh.axes):
        raise MeshError(f"the mesh {mesh} has open sizes; give each axis a number to check a layout on it")
    layout = choose_layout(arguments.layout, axes)
    model, inputs = load_target(arguments.target, settings)
    told = {"target": arguments.target, "layout": arguments.layout, "mesh": str(mesh)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AutoparWarning)
        try:
            found = _checked(model, inputs, dims, layout, axes, arguments.cluster)
        except LayoutError as error:
            if error.code in UNREADABLE:
                raise
            found = {"holds": False, "code": error.code, "reason": str(error)}
    warned = [str(one.message) for one in caught if issubclass(one.category, AutoparWarning)]
    found = {**told, **found, "warnings": warned}
    if arguments.json:
        print(json.dumps(found, indent=1))
    else:
        print(*(f"warning: {text}" for text in warned), _sentence(found), sep="\n")
    return 0 if found["holds"] else 1


def _checked(
    model: Any, inputs: Any, dims: dict[str, str], layout: Layout, axes: dict[str, int], cluster: str | None
) -> dict[str, Any]:
    from autopar.api import trace
    from autopar.contracts import check_contracts, check_memory, memory_limit
    from autopar.conversions import conversions
    from autopar.cost.cluster import load_cluster
    from autopar.decided import Plan
    from autopar.layout.syntax import Guard, Limit, Same

    device_bytes = None if cluster is None else load_cluster(cluster).device.memory_bytes
    memory_limit(layout, device_bytes)
    graph = trace(model, inputs, dims=dims or None)
    plan = Plan.of(graph, layout, axes)
    inserted = conversions(graph, plan.decisions)
    check_contracts(layout, graph, plan.decisions, inserted)
    check_memory(layout, graph, plan, device_bytes)
    return {
        "holds": True,
        "contracts": sum(isinstance(statement, Guard | Limit | Same) for statement in layout),
        "tensors": len(graph.tensors),
        "ops": len(graph.nodes),
        "collectives": sum(1 for one in inserted for _ in one.collectives()),
    }


def _sentence(found: dict[str, Any]) -> str:
    where = f"{found['layout']} on {found['mesh']}"
    if not found["holds"]:
        return f"{where} does NOT hold for {found['target']}:\n{found['reason']}"
    count = found["contracts"]
    contracts = f"{count} contract{'s' if count > 1 else ''} kept" if count else "no contracts in it"
    return (
        f"{where} holds for {found['target']}: {found['ops']} ops and {found['tensors']} tensors laid out, "
        f"{found['collectives']} collectives, {contracts}."
    )
