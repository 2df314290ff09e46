"""How `--help` is laid out: the description in lines that fit, the examples as they are written."""

from __future__ import annotations

import argparse

__all__ = ["HelpText"]


class HelpText(argparse.HelpFormatter):
    """Text of one line is wrapped; text of several lines, the examples, stays as it is."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return "".join(f"{indent}{line}" for line in text.splitlines(keepends=True))
        return super()._fill_text(text, width, indent)
