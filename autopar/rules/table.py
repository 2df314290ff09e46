"""Rule table: one line per op. `lookup` gives the rule of a call; adding an op is adding a line.

    aten.linear.default    ... k, n k, n? -> ... n; linear 0+2 1+2
    aten.mean.dim          reduce mean; linear 0

A line holds the op, then either dims in the notation or the name of a family (a function of the call, for ops whose
dims depend on their arguments, with its own words), then clauses. `try` clauses tell the proof which operands and
arguments to use: `try positive`, `try exponent=2.0`, and which module to import first: `try @mylib.ops`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from autopar.errors import RuleError
from autopar.rules.bind_call import bind
from autopar.rules.call import Call
from autopar.rules.notation import Rule, parse_clauses, parse_rule
from autopar.rules.proof.samples import Sample, Tries, pattern_samples

__all__ = ["OpFamily", "RuleTable", "TableEntry", "parse_entry", "parse_table"]


@dataclass(frozen=True)
class OpFamily:
    """Rules that depend on the call: `rule(call, *words)` writes one, `samples(op, tries, *words)` gives calls."""

    rule: Callable[..., str]
    samples: Callable[..., Iterable[Sample]]


@dataclass(frozen=True)
class TableEntry:
    """One line of the table."""

    op: str
    line: str
    pattern: Rule | None
    family: OpFamily | None
    words: tuple[str, ...]
    clauses: Rule
    tries: Tries

    def rule(self, call: Call) -> Rule:
        """Return the rule of one call, fully bound."""
        if self.pattern is not None:
            return bind(self.pattern, call)
        assert self.family is not None, self.line
        text = self.family.rule(call, *self.words)
        return bind(parse_rule(text).with_clauses(self.clauses), call)

    def samples(self, op: torch._ops.OpOverload) -> Iterable[Sample]:
        """Return sample calls for the proof of the rule."""
        if self.pattern is not None:
            return pattern_samples(op, self.pattern, self.tries)
        assert self.family is not None, self.line
        return self.family.samples(op, self.tries, *self.words)


class RuleTable(Mapping[str, TableEntry]):
    """All entries by op; immutable, `with_entries` gives another one."""

    def __init__(self, entries: Iterable[TableEntry]) -> None:
        self._entries: dict[str, TableEntry] = {}
        for entry in entries:
            if entry.op in self._entries:
                raise RuleError(f"two rules for {entry.op}:\n  {self._entries[entry.op].line}\n  {entry.line}")
            self._entries[entry.op] = entry

    def __getitem__(self, op: str) -> TableEntry:
        return self._entries[op]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def with_entries(self, entries: Iterable[TableEntry]) -> RuleTable:
        """Return this table with more entries, which replace those of the same ops."""
        return RuleTable({**self._entries, **{entry.op: entry for entry in entries}}.values())


def parse_table(text: str, families: Mapping[str, OpFamily]) -> list[TableEntry]:
    """Parse the lines of a table; `{a,b}` in an op's name stands for several ops."""
    entries: list[TableEntry] = []
    for line in text.splitlines():
        # Tables may have comments of their own.
        line = line.partition("#")[0].strip()
        if line:
            name, _, body = line.partition(" ")
            entries.extend(parse_entry(op, body.strip(), families) for op in _alternatives(name))
    return entries


def _alternatives(name: str) -> list[str]:
    head, brace, rest = name.partition("{")
    if not brace:
        return [name]
    middle, _, tail = rest.partition("}")
    return [alternative for choice in middle.split(",") for alternative in _alternatives(head + choice + tail)]


def parse_entry(op: str, body: str, families: Mapping[str, OpFamily]) -> TableEntry:
    """Parse one line: dims or a family, then clauses."""
    head, *clauses = (part.strip() for part in body.split(";"))
    tries = _parse_tries([clause for clause in clauses if clause.split()[:1] == ["try"]])
    kept = [clause for clause in clauses if clause.split()[:1] != ["try"]]
    line = f"{op}  {body}"
    if "->" in head:
        return TableEntry(op, line, parse_rule("; ".join([head, *kept])), None, (), Rule((), ()), tries)
    family, *words = head.split()
    if family not in families:
        raise RuleError(f"'{family}' is no family of rules, and the line has no '->'\n  {line}")
    return TableEntry(op, line, None, families[family], tuple(words), parse_clauses("; ".join(kept)), tries)


def _parse_tries(clauses: list[str]) -> Tries:
    kind, needs = "normal", ""
    arguments: list[tuple[str, object]] = []
    for clause in clauses:
        for word in clause.split()[1:]:
            key, equals, value = word.partition("=")
            if equals:
                arguments.append((key, ast.literal_eval(value)))
            elif key.startswith("@"):
                needs = key[1:]
            else:
                kind = key
    return Tries(kind, tuple(arguments), needs)
