"""Invariants: statements about a value that must hold when one stage hands it to the next.

A verifier is a table of them. The order counts: a check may rely on the invariants before its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

__all__ = ["Invariant", "InvariantError", "check_invariants", "verifying"]

T = TypeVar("T")

# A broken table of a large model would fill the screen.
MOST_PLACES = 5


class InvariantError(AssertionError):
    """A value that a stage hands on is broken: a bug of autopar. Names the invariant and the places."""

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(text)
        self.invariant = invariant


@dataclass(frozen=True)
class Invariant(Generic[T]):
    """One row of a verifier's table; `violations` yields a line for each place that breaks the statement."""

    name: str
    statement: str
    violations: Callable[[T], Iterator[str]]


def verifying() -> bool:
    """Return whether stages verify the values that they hand on: with `AUTOPAR_VERIFY=1` in the environment."""
    return os.environ.get("AUTOPAR_VERIFY", "") not in ("", "0")


def check_invariants(what: str, table: Iterable[Invariant[T]], value: T) -> None:
    """Raise `InvariantError` for the first invariant of the table that the value breaks."""
    for invariant in table:
        places = list(islice(invariant.violations(value), MOST_PLACES + 1))
        if places:
            more = ["  ..."] if len(places) > MOST_PLACES else []
            raise InvariantError(
                invariant.name,
                "\n".join(
                    [
                        f"{what} breaks the invariant '{invariant.name}': {invariant.statement}",
                        *(f"  {place}" for place in places[:MOST_PLACES]),
                        *more,
                        "this is a bug of autopar",
                    ]
                ),
            )
