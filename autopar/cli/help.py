"""How `--help` is laid out: the description in lines that fit, the examples as they are written."""

from __future__ import annotations

import argparse
from typing import NoReturn

__all__ = ["CommandParser", "HelpText"]


class CommandParser(argparse.ArgumentParser):
    """Says what argparse leaves out of a message."""

    def error(self, message: str) -> NoReturn:
        """`--memory -1GiB` looks like two options; who meant a value is told how to write it."""
        option = message.removeprefix("argument ").partition(":")[0].split("/")[-1]
        if message.endswith("expected one argument"):
            message += f"\nfix: give {option} a value; one that begins with '-' is written with '=', as in {option}=-1"
        super().error(message)


class HelpText(argparse.HelpFormatter):
    """Text of one line is wrapped; text of several lines, the examples, stays as it is."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return "".join(f"{indent}{line}" for line in text.splitlines(keepends=True))
        return super()._fill_text(text, width, indent)
