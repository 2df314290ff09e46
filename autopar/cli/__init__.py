"""The command line. Exit codes: 0, 1 (the answer is no), 2 (the command was wrong)."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from autopar import __version__
from autopar.cli import (
    calibrate,
    check,
    clusters,
    compare,
    doctor,
    explain,
    new,
    plan,
    report,
    strategies,
    trace,
    verify,
)
from autopar.cli.parser import SHELLS, CommandParser, HelpText, PrintCompletion
from autopar.cli.plan_arguments import check_words
from autopar.errors import AutoparError, AutoparWarning, TraceError
from autopar.names import printable

__all__ = ["main"]

COMMANDS = (plan, explain, compare, check, verify, report, trace, strategies, clusters, calibrate, new, doctor)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    parser = CommandParser(
        prog="autopar",
        description="Automatic parallelism for PyTorch.",
        epilog="Try: autopar plan examples/gpt.py:gpt --mesh dp=2,tp=2\n"
        "Each command shows examples: autopar plan --help. The tutorial and all else is in docs/.\n",
        formatter_class=HelpText,
    )
    parser.add_argument("--version", action="version", version=f"autopar {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(subparsers)
    parser.add_argument(
        "--print-completion",
        action=PrintCompletion,
        choices=SHELLS,
        help="print the completion of this command line for a shell",
    )
    arguments = parser.parse_args(argv)
    try:
        with _warnings_in_words(arguments.command):
            check_words(arguments)
            code: int = arguments.run(arguments)
    except AutoparError as error:
        print(f"autopar {arguments.command}: {printable(str(error))}", file=sys.stderr)
        # A model that cannot be traced is an answer; all other errors are mistakes in the command.
        return 1 if isinstance(error, TraceError) else 2
    except BrokenPipeError:  # the reader (`| head`) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


@contextmanager
def _warnings_in_words(command: str) -> Iterator[None]:
    """Print warnings as errors are printed: once, without the line of code that warned."""
    shown: set[str] = set()
    with warnings.catch_warnings():
        usual = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *rest: Any) -> None:
            if not issubclass(category, AutoparWarning):
                usual(message, category, *rest)
            elif str(message) not in shown:
                shown.add(str(message))
                print(f"autopar {command}: warning: {printable(str(message))}", file=sys.stderr)

        warnings.showwarning = show  # type: ignore[assignment]  # the rest is passed on as it comes
        yield
