"""`autopar strategies [NAME]`: the published strategies that come with autopar."""

from __future__ import annotations

import argparse
from typing import Any

from autopar.cli.json_output import add_json, print_data
from autopar.cli.parser import HelpText
from autopar.sharding.layout.language import axes_of, load_strategy, strategy_names, strategy_path

__all__ = ["add_parser"]

EXAMPLES = """examples:
  autopar strategies
  autopar strategies megatron
  autopar strategies megatron > mine.lay
"""


def add_parser(subparsers: Any) -> None:
    """Add this command to the command line."""
    parser = subparsers.add_parser(
        "strategies",
        help="list the strategies that come with autopar, or print one",
        description="List the strategies that come with autopar, each with what it does; with a NAME, print its file.",
        epilog=EXAMPLES,
        formatter_class=HelpText,
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="the strategy to print")
    add_json(parser, "strategies")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """List or print."""
    names = strategy_names() if arguments.name is None else (arguments.name,)
    if arguments.json:
        print_data("strategies", {"strategies": [_data(name) for name in names]})
        return 0
    if arguments.name is not None:
        print(strategy_path(arguments.name).read_text(encoding="utf-8"), end="")
        return 0
    width = max(map(len, names), default=0)
    for name in names:
        print(f"{name:{width}}  {_description(name)}".rstrip())
    return 0


def _description(name: str) -> str:
    strategy = load_strategy(name).strategy
    return strategy.description if strategy and strategy.description else ""


def _data(name: str) -> dict[str, Any]:
    text = strategy_path(name).read_text(encoding="utf-8")
    return {
        "name": name,
        "description": _description(name),
        "axes": list(axes_of(load_strategy(name))),
        "layout": text,
    }
