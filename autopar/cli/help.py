"""Layout of `--help`: wrapped description, examples as written."""

from __future__ import annotations

import argparse
from typing import NoReturn

__all__ = ["CommandParser", "HelpText"]


class CommandParser(argparse.ArgumentParser):
    """Parser whose messages add a fix where argparse gives none."""

    def error(self, message: str) -> NoReturn:
        """Add a fix for a value that begins with '-': argparse takes `--memory -1GiB` for two options."""
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
