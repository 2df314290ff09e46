"""`autopar --print-completion SHELL`: the completion of the command line, from the parser itself."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator, Sequence
from typing import Any

from autopar.cost.hardware.cluster import cluster_names
from autopar.sharding.layout.language import strategy_names

__all__ = ["SHELLS", "PrintCompletion"]

SHELLS = ("bash", "zsh", "fish")
# Names of arguments, as in `--help`, that complete to files.
FILES = ("CSV", "FILE", "INSTANCE", "LAYOUT", "PLAN", "TARGET")


class PrintCompletion(argparse.Action):
    """Print the completion script of shtab and exit; shtab is imported only here."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        try:
            shtab: Any = importlib.import_module("shtab")
        except ModuleNotFoundError:
            parser.error("completion needs shtab, which is not installed\nfix: pip install 'autopar[completion]'")
        for command, action in _actions(parser):
            if action.metavar in FILES:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
            elif action.dest in ("cluster", "like") or (command, action.dest) == ("clusters", "name"):
                action.choices = cluster_names()
            elif (command, action.dest) == ("strategies", "name"):
                action.choices = strategy_names()
        print(shtab.complete(parser, shell=values))
        parser.exit()


def _actions(parser: argparse.ArgumentParser, command: str = "") -> Iterator[tuple[str, argparse.Action]]:
    """Yield the arguments of the parser with their command; argparse has no public list of them."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from _actions(below, name)
        else:
            yield command, action
