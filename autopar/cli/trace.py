"""`autopar trace TARGET`: the named graph, for a person or a program."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from autopar.cli.json_output import add_json, print_data
from autopar.cli.parser import HelpText
from autopar.cli.plan_arguments import PRECISION, add_target
from autopar.cli.target import load_target, parse_dims, parse_settings

__all__ = ["add_parser"]

EXAMPLES = """examples:
  autopar trace examples/gpt.py:gpt
  autopar trace examples/hf.py:hf --set architecture=bert
  autopar trace examples/mlp.py:mlp --dims x="batch features"
  autopar trace examples/llama3_8b.py:llama3_8b --json > llama.json
"""


def add_parser(subparsers: Any) -> None:
    """Add this command to the command line."""
    parser = subparsers.add_parser(
        "trace",
        help="print a model's graph with the rule of every op and the name of every dim",
        description="Print a model's graph: tensors by their named dims, the rule of every op, repeated layers once.",
        epilog=EXAMPLES,
        formatter_class=HelpText,
    )
    add_target(parser)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--train", action="store_true", help="trace in train mode (default: as the function returns the model)"
    )
    mode.add_argument("--eval", action="store_true", help="trace in eval mode")
    parser.add_argument("--precision", metavar="NAME", help=PRECISION)
    add_json(parser, "trace")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Trace and print."""
    settings = parse_settings(arguments.set)
    dims = parse_dims(arguments.dims)
    if sys.stderr.isatty():
        print(f"tracing {arguments.target} ...", file=sys.stderr)
    model, inputs = load_target(arguments.target, settings)
    from autopar.tracing.trace import trace  # late: torch takes seconds to load, a wrong word fails at once

    if arguments.train or arguments.eval:
        model.train(arguments.train)
    graph = trace(model, inputs, dims=dims, precision=arguments.precision)
    if arguments.json:
        print_data("trace", graph.to_json())
    else:
        print(graph)
    return 0
