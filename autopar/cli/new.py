"""`autopar new FILE`: a training script to start from."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from autopar.cli.parser import HelpText
from autopar.errors import AutoparError
from autopar.files import data_folder, write_text

__all__ = ["SCRIPT", "add_parser"]

SCRIPT = "train_text.py"
EXAMPLES = """examples:
  autopar new train.py
"""
NEXT = """{file}: a small language model and its training loop. Try:
  python {file}
  autopar plan {file}:language_model --mesh dp=2,tp=2
  autopar verify {file}:language_model --mesh dp=2,tp=2 --layout megatron
  torchrun --nproc-per-node 4 {file} --mesh dp=2,tp=2"""


def add_parser(subparsers: Any) -> None:
    """Add this command to the command line."""
    parser = subparsers.add_parser(
        "new",
        help="write a training script to start from",
        description="Write a small language model with its training loop, which runs on one process and on many.",
        epilog=EXAMPLES,
        formatter_class=HelpText,
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="the script to write, as in train.py; it must be new")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the script under its new name."""
    file: Path = arguments.file
    if file.suffix != ".py":
        named = file.with_suffix(".py") if file.name else "train.py"
        raise AutoparError(f"{file}: a script of Python ends in .py\nfix: autopar new {named}")
    if file.exists():
        raise AutoparError(f"{file}: this file is there already, and nothing was written\nfix: give another name")
    text = (data_folder("examples") / SCRIPT).read_text(encoding="utf-8")
    write_text(file, text.replace(SCRIPT, str(file)))
    print(NEXT.format(file=file))
    return 0
