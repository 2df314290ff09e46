"""Data for programs: `--json` prints it, `--json-schema` its schema."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["add_json", "print_data", "schema_of", "schema_text", "schemas"]

_FOLDER = Path(__file__).with_name("schemas")


def add_json(parser: argparse._ActionsContainer, command: str) -> None:
    """Add `--json` and `--json-schema` to a command with a schema."""
    parser.add_argument("--json", action="store_true", help="print plain data, for programs")
    parser.add_argument(
        "--json-schema",
        action=_PrintSchema,
        const=command,
        nargs=0,
        default=argparse.SUPPRESS,
        help="print the JSON Schema of what --json prints, and leave",
    )


def schemas() -> tuple[str, ...]:
    """Return the commands that have a schema."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))


def schema_text(command: str) -> str:
    return (_FOLDER / f"{command}.json").read_text(encoding="utf-8")


def schema_of(command: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(schema_text(command))
    return found


def print_data(command: str, data: Mapping[str, Any]) -> None:
    """Print one JSON object that begins with the version of its schema."""
    # The schema is the only place of the version, so that both cannot differ.
    version = schema_of(command)["properties"]["version"]["const"]
    # JSON has no infinity and no NaN: callers give null.
    print(json.dumps({"version": version, **data}, indent=1, allow_nan=False))


class _PrintSchema(argparse.Action):
    """Action that prints the schema and exits, whatever else the command line says."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        assert isinstance(self.const, str)
        print(schema_text(self.const), end="")
        parser.exit()
