"""`autopar strategies [NAME]`: the layouts that come with autopar."""

from __future__ import annotations

import argparse
from typing import Any

from autopar.layout.strategies import load_strategy, strategy_names, strategy_path

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
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="the strategy to print")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """List or print."""
    if arguments.name is not None:
        print(strategy_path(arguments.name).read_text(encoding="utf-8"), end="")
        return 0
    names = strategy_names()
    width = max(map(len, names), default=0)
    for name in names:
        strategy = load_strategy(name).strategy
        description = strategy.description if strategy and strategy.description else ""
        print(f"{name:{width}}  {description}".rstrip())
    return 0
