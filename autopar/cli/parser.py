"""Parser of the command line: layout of `--help`, messages with a fix, completion of shells."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from autopar.cost.hardware.cluster import cluster_names
from autopar.sharding.layout.language import strategy_names

__all__ = ["SHELLS", "CommandParser", "HelpText", "PrintCompletion"]


class CommandParser(argparse.ArgumentParser):
    """Parser whose messages add a fix where argparse gives none."""

    def error(self, message: str) -> NoReturn:
        """Add a fix for a value that begins with '-': argparse takes `--memory -1GiB` for two options."""
        # argparse gives the error as text only: `argument -o/--output: expected one argument`.
        option = message.removeprefix("argument ").partition(":")[0].split("/")[-1]
        if message.endswith("expected one argument"):
            message += f"\nfix: give {option} a value; one that begins with '-' is written with '=', as in {option}=-1"
        super().error(message)


class HelpText(argparse.HelpFormatter):
    """Formatter that wraps text of one line and keeps text of several lines, such as examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return "".join(f"{indent}{line}" for line in text.splitlines(keepends=True))
        return super()._fill_text(text, width, indent)


# -- completion of shells ----------------------------------------------------------------------------------------------


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
