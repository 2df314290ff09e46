"""Reads and writes instances in the format of the ASPLOS/EuroSys 2025 contest on intra-operator parallelism.

    {"problem": {"name": ..., "usage_limit": 50,
                 "nodes": {"intervals": [[start, end], ...], "costs": [[...], ...], "usages": [[...], ...]},
                 "edges": {"nodes": [[i, j], ...], "costs": [[row by row], ...]}}}

A node uses memory from `start` to before `end`; a cost of 10^18 or more means impossible. Most cost lists of a large
instance are the same few: each distinct text is decoded once, and the arrays are shared.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np

from autopar.names import printable
from autopar.solver import Floats, Ints
from benchmarks.contest.problem import Edge, Problem, ProblemError, Usage

__all__ = ["IMPOSSIBLE", "problem_from_text", "problem_to_json", "read_problem", "write_problem"]

IMPOSSIBLE = 10**18
# A string, which is kept, or a list without lists in it, which is replaced by a mark: a string, "[" and its number.
FLAT_LIST = re.compile(r'"(?:[^"\\]|\\.)*"|\[[^\[\]{}"]*\]')
# Sums of usages are kept in 64 bits.
LARGEST_TOTAL_USAGE = 2**62
# Bytes of text. Those of the contest have less than a tenth; of a compressed file no more is ever unpacked.
LARGEST_TEXT = 2**30
# Before a string of the file that would look like a mark. No string of a file keeps it: JSON has no such character.
OWN = "\0"
# Python reads no longer ones.
LONG_NUMBER = re.compile(r"[0-9]{4301,}")

T = TypeVar("T")


def read_problem(path: str | Path) -> Problem:
    """Return the instance in a `.json` or `.json.gz` file."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            is_packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if is_packed else path.open("rb") as file:
            data = file.read(LARGEST_TEXT + 1)
        if len(data) > LARGEST_TEXT:
            raise ProblemError(f"{path}: is longer than {LARGEST_TEXT:,} bytes, which no instance is")
        text = data.decode("utf-8")
    except FileNotFoundError:
        raise ProblemError(f"{path}: there is no such file") from None
    except (OSError, EOFError, zlib.error) as error:
        raise ProblemError(f"{path}: cannot be read: {error}") from error
    except UnicodeDecodeError as error:
        raise ProblemError(f"{path}: is not text: {error}") from error
    return problem_from_text(text, str(path))


def problem_from_text(text: str, place: str = "instance") -> Problem:
    """Return the instance that a text states; `place` is what error messages call it."""
    numbers: dict[str, int] = {}

    def numbered(match: re.Match[str]) -> str:
        found = match.group()
        if found[0] == '"':
            return _unlike_marks(found)
        return f'"[{numbers.setdefault(found, len(numbers))}"'

    skeleton = FLAT_LIST.sub(numbered, text)
    try:
        lists = json.loads(f"[{','.join(numbers)}]")
        whole = json.loads(skeleton)
    except (ValueError, RecursionError):
        _refuse_text(text, place)
    return _Reader(place, lists).problem(whole)


def _unlike_marks(found: str) -> str:
    """Return a string of the file, changed if it looks like a mark; `[` may be spelt `\\u005b`."""
    if found[1:2] not in ("[", "\\"):
        return found
    try:
        text: str = json.loads(found)
    except ValueError:
        return found  # the whole is no JSON
    return json.dumps(OWN + text) if text.startswith(("[", OWN)) else found


def _refuse_text(text: str, place: str) -> NoReturn:
    """Find where the text stops being JSON."""
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        long = None if isinstance(error, json.JSONDecodeError) else LONG_NUMBER.search(text)
        if long is not None:
            line = text.count("\n", 0, long.start()) + 1
            where = f"line {line} column {long.start() - text.rfind(chr(10), 0, long.start())}"
            raise ProblemError(f"{place}: {where} holds a number of {len(long.group()):,} digits") from None
        raise ProblemError(f"{place}: is not JSON: {error}") from None
    raise ProblemError(f"{place}: is not JSON")


class _Reader:
    """Turns decoded JSON, whose innermost lists are numbered, into a problem."""

    def __init__(self, place: str, lists: list[Any]) -> None:
        self.place = place
        self.lists = lists

    def problem(self, whole: Any) -> Problem:
        body = self.member(whole, "problem", dict, "")
        nodes = self.member(body, "nodes", dict, "problem.")
        costs = self.column(nodes, "nodes.costs", _costs)
        intervals = self.column(nodes, "nodes.intervals", _interval)
        usages = self.column(nodes, "nodes.usages", _usages)
        for name, values in (("nodes.intervals", intervals), ("nodes.usages", usages)):
            self.same_length("nodes.costs", costs, name, values)
        for node, (node_costs, node_usages) in enumerate(zip(costs, usages, strict=True)):
            if len(node_costs) != len(node_usages):
                self.refuse(
                    f"nodes.usages[{node}] has {len(node_usages)} values and nodes.costs[{node}] has {len(node_costs)}"
                )
        limit = body.get("usage_limit")
        if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool)):
            self.refuse(f"usage_limit is {self.shown(limit)}; it should be a whole number")
        if limit is not None and limit <= -LARGEST_TOTAL_USAGE:
            self.refuse(f"usage_limit is {self.shown(limit)}; it should be above -2^62")
        if limit is not None and limit >= LARGEST_TOTAL_USAGE:
            limit = None  # larger than any sum of usages that is read
        usage_rows, limits = ((), np.zeros(0, np.int64)) if limit is None else self.usages(intervals, usages, limit)
        name = body.get("name", "")
        name = printable(str(name).removeprefix(OWN))
        return Problem(tuple(costs), self.edges(body, costs), usage_rows, limits, name)

    def edges(self, body: Any, costs: list[Floats]) -> tuple[Edge, ...]:
        if "edges" not in body:
            return ()
        edges = self.member(body, "edges", dict, "problem.")
        ends = self.column(edges, "edges.nodes", _ends)
        values = self.column(edges, "edges.costs", _costs)
        self.same_length("edges.nodes", ends, "edges.costs", values)
        shaped: dict[tuple[int, int, int], Floats] = {}
        result = []
        for position, ((first, second), flat) in enumerate(zip(ends, values, strict=True)):
            for node in (first, second):
                if not 0 <= node < len(costs):
                    self.refuse(f"edges.nodes[{position}] names node {node}; there are nodes 0 to {len(costs) - 1}")
            if first == second:
                self.refuse(f"edges.nodes[{position}] joins node {first} to itself")
            rows, columns = len(costs[first]), len(costs[second])
            if len(flat) != rows * columns:
                self.refuse(
                    f"edges.costs[{position}] has {len(flat)} values; nodes {first} and {second} have "
                    f"{rows} × {columns} strategies"
                )
            key = (id(flat), rows, columns)
            if key not in shaped:
                shaped[key] = flat.reshape(rows, columns)
            result.append(Edge(first, second, shaped[key]))
        return tuple(result)

    def usages(
        self, intervals: list[tuple[int, int]], usages: list[Ints], limit: int
    ) -> tuple[tuple[Usage, ...], Ints]:
        total = sum(float(np.abs(amounts).max()) for amounts in usages)
        if total >= LARGEST_TOTAL_USAGE:
            self.refuse(f"nodes.usages add up to {total:.3g}; sums are kept in 64 bits")
        # Usage is highest where some interval starts: those are the only points that need a limit.
        points = np.unique(np.array([start for start, end in intervals if start < end], dtype=np.int64))
        starts = np.searchsorted(points, np.array([start for start, _ in intervals], dtype=np.int64))
        ends = np.searchsorted(points, np.array([end for _, end in intervals], dtype=np.int64))
        rows = tuple(
            Usage(node, int(starts[node]), int(ends[node]), usages[node])
            for node, (start, end) in enumerate(intervals)
            if start < end
        )
        return rows, np.full(len(points), limit, dtype=np.int64)

    def column(self, table: Any, name: str, decode: Callable[[Any], T | str]) -> list[T]:
        """Return a list of lists; each distinct inner list is decoded once."""
        values = self.member(table, name.split(".")[1], list, name.split(".")[0] + ".")
        result: list[T] = []
        decoded: dict[str, T | str] = {}
        for position, value in enumerate(values):
            if not _marks_list(value):
                self.refuse(f"{name}[{position}] is {self.shown(value)}; it should be a list of numbers")
            if value not in decoded:
                decoded[value] = decode(self.list_of(value))
            each = decoded[value]
            if isinstance(each, str):
                self.refuse(f"{name}[{position}] {each}")
            result.append(each)
        return result

    def member(self, table: Any, name: str, kind: type, prefix: str) -> Any:
        if not isinstance(table, dict):
            self.refuse(f"{prefix[:-1] or 'the whole'} is {self.shown(table)}; it should be an object")
        if name not in table:
            self.refuse(f"{prefix}{name} is missing")
        value = table[name]
        if kind is list and _marks_list(value):
            value = self.list_of(value)
            if value:  # a list of plain values where a list of lists belongs
                self.refuse(f"{prefix}{name}[0] is {_shown(value[0])}; it should be a list of numbers")
        if not isinstance(value, kind):
            wanted = "an object" if kind is dict else "a list"
            self.refuse(f"{prefix}{name} is {self.shown(value)}; it should be {wanted}")
        return value

    def list_of(self, mark: str) -> list[Any]:
        found: list[Any] = self.lists[int(mark[1:])]
        return found

    def shown(self, value: Any) -> str:
        own = value.removeprefix(OWN) if isinstance(value, str) else value
        return _shown(self.list_of(value) if _marks_list(value) else own)

    def same_length(self, name: str, values: list[Any], other: str, others: list[Any]) -> None:
        if len(values) != len(others):
            self.refuse(f"{other} has {len(others)} entries and {name} has {len(values)}")

    def refuse(self, text: str) -> NoReturn:
        raise ProblemError(f"{self.place}: {text}")


def _marks_list(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("[")


def _costs(values: list[Any]) -> Floats | str:
    if not values:
        return "is empty; there should be at least one cost"
    if not all(type(value) in (int, float) for value in values):
        wrong = next(value for value in values if type(value) not in (int, float))
        return f"holds {_shown(wrong)}; costs are numbers"
    costs = np.array([float(max(-IMPOSSIBLE, min(value, IMPOSSIBLE))) for value in values])
    if not np.all(costs > -IMPOSSIBLE):
        return "holds a cost that is no number or below -10^18"
    costs[costs >= IMPOSSIBLE] = np.inf
    costs.flags.writeable = False
    return costs


def _usages(values: list[Any]) -> Ints | str:
    if not all(type(value) is int and abs(value) < LARGEST_TOTAL_USAGE for value in values):
        wrong = next(value for value in values if type(value) is not int or abs(value) >= LARGEST_TOTAL_USAGE)
        return f"holds {_shown(wrong)}; usages are whole numbers below 2^62"
    amounts = np.array(values, dtype=np.int64)
    amounts.flags.writeable = False
    return amounts


def _pair(values: list[Any], what: str) -> tuple[int, int] | str:
    if len(values) != 2 or not all(type(value) is int and abs(value) < 2**62 for value in values):
        return f"is {_shown(values)}; it should be {what}"
    return values[0], values[1]


def _interval(values: list[Any]) -> tuple[int, int] | str:
    pair = _pair(values, "[start, end], in whole numbers")
    if not isinstance(pair, str) and pair[1] < pair[0]:
        return f"ends before it starts: {_shown(values)}"
    return pair


def _ends(values: list[Any]) -> tuple[int, int] | str:
    return _pair(values, "the numbers of two nodes")


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


def problem_to_json(problem: Problem) -> dict[str, Any]:
    """Return the problem in the contest's format, which knows one range and one limit for all."""
    limits = set(problem.limits.tolist())
    if len(limits) > 1:
        raise ProblemError("the contest's format has one usage limit; this problem has several")
    usages: list[list[int]] = [[0] * count for count in problem.strategy_counts]
    intervals = [[0, 0] for _ in problem.costs]
    for usage in problem.usages:
        if intervals[usage.node] != [0, 0]:
            raise ProblemError(f"the contest's format has one usage per node; node {usage.node} has several")
        intervals[usage.node] = [usage.start, usage.end]
        usages[usage.node] = usage.amounts.tolist()
    body = {
        "name": problem.name,
        "nodes": {"intervals": intervals, "costs": [_written(costs) for costs in problem.costs], "usages": usages},
        "edges": {
            "nodes": [[edge.first, edge.second] for edge in problem.edges],
            "costs": [_written(edge.costs) for edge in problem.edges],
        },
    }
    if limits:
        body["usage_limit"] = limits.pop()
    return {"problem": body}


def _written(costs: Floats) -> list[int | float]:
    return [
        IMPOSSIBLE if value == np.inf else int(value) if float(value).is_integer() else value
        for value in costs.ravel().tolist()
    ]


def write_problem(problem: Problem, path: str | Path) -> None:
    """Write an instance; gzipped when the name ends in `.gz`."""
    data = json.dumps(problem_to_json(problem)).encode()
    Path(path).write_bytes(gzip.compress(data) if str(path).endswith(".gz") else data)
