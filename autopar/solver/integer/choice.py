"""`SolverChoice`: who decides a plan and who proves it, by name: the search, a linear or an integer program."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from autopar.errors import AutoparError
from autopar.names import did_you_mean

__all__ = ["COMMENTS", "INTEGER_SOLVERS", "LINEAR_SOLVERS", "SEARCH", "SolverChoice", "check_format", "parse_solver"]

# Solvers by name, as MathOpt calls them; the first one is the default.
INTEGER_SOLVERS = {"highs": "HIGHS", "scip": "GSCIP", "cp-sat": "CP_SAT"}
LINEAR_SOLVERS = {"highs": "HIGHS", "glop": "GLOP", "pdlp": "PDLP"}
LIBRARIES = {"search": {}, "lp": LINEAR_SOLVERS, "ilp": INTEGER_SOLVERS}
TITLES = {"search": "search", "lp": "linear relaxation", "ilp": "integer program"}


@dataclass(frozen=True)
class SolverChoice:
    """`search`; `lp`: the search, with the bound of the linear relaxation; `ilp`: the integer program."""

    method: str = "search"
    # One of the solvers of the method.
    library: str = ""

    @property
    def title(self) -> str:
        """Return the words for plans and bounds that come from it."""
        return f"{TITLES[self.method]} ({self.library})" if self.library else TITLES[self.method]

    def __str__(self) -> str:
        return f"{self.method}:{self.library}" if self.library else self.method


SEARCH = SolverChoice()


def parse_solver(text: str) -> SolverChoice:
    """Return the choice that a text names: `search`, `lp`, `lp:glop`, `ilp`, `ilp:scip`."""
    method, _, library = text.partition(":")
    names = [*LIBRARIES, *(f"{name}:{one}" for name, known in LIBRARIES.items() for one in known)]
    if text not in names:
        raise AutoparError(
            f"unknown solver '{text}'{did_you_mean(text, names)}\nfix: one of {', '.join(names)}; ilp alone is "
            f"ilp:{next(iter(INTEGER_SOLVERS))}"
        )
    return SolverChoice(method, library or next(iter(LIBRARIES[method]), ""))


# Suffixes of files that a program is written to, and what begins a comment in them.
COMMENTS = {".mps": "* ", ".lp": "\\ "}


def check_format(path: str | Path) -> str:
    """Return the suffix of a file that a program can be written to."""
    suffix = Path(path).suffix.lower()
    if suffix not in COMMENTS:
        raise AutoparError(f"--write-model {path}: expected a file .mps or .lp\nfix: as in --write-model plan.mps")
    return suffix
