"""`autopar --print-completion SHELL`: the completion of the command line, from the parser itself."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from typing import Any

__all__ = ["SHELLS", "PrintCompletion"]

SHELLS = ("bash", "zsh")


class PrintCompletion(argparse.Action):
    """Print what shtab makes of the parser, and leave; shtab is loaded only here."""

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
        print(shtab.complete(parser, shell=values))
        parser.exit()
