"""Usage limits while a problem shrinks: which strategies can still fit, which limits can still bind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.solver import Ints

__all__ = ["Capacities", "LimitRow", "range_minima"]


@dataclass(frozen=True, eq=False)
class LimitRow:
    """Usage of a node's strategies on the limits `start` .. `end`-1, above the least of them."""

    start: int
    end: int
    amounts: Ints


class Capacities:
    """The limits less what is used whatever is chosen, and the rows of every node."""

    def __init__(self, limits: Ints, counts: Sequence[int]) -> None:
        self.left = limits.astype(np.int64)
        self.steps = np.zeros(len(limits) + 1, dtype=np.int64)  # fixed usage that is not yet taken off `left`
        self.places = np.arange(len(limits))  # which of the limits given are left
        self.rows: list[dict[tuple[int, int], Ints]] = [{} for _ in counts]

    def add(self, node: int, start: int, end: int, amounts: Ints) -> None:
        """Add a row; rows over the same limits become one, and what all strategies use is taken off the limits."""
        if start >= end:
            return
        same = self.rows[node].pop((start, end), None)
        if same is not None:
            amounts = amounts + same
        least = int(amounts.min())
        if least:
            self.steps[start] += least
            self.steps[end] -= least
            amounts = amounts - least
        if amounts.any():
            self.rows[node][start, end] = amounts

    def rows_of(self, node: int) -> list[LimitRow]:
        return [LimitRow(start, end, amounts) for (start, end), amounts in self.rows[node].items()]

    def select(self, node: int, strategies: Ints) -> None:
        rows, self.rows[node] = self.rows[node], {}
        for (start, end), amounts in rows.items():
            self.add(node, start, end, amounts[strategies])

    def move(self, node: int, other: int, function: Ints) -> None:
        """Give a node's rows to another one, whose strategy s stands for function[s]."""
        rows, self.rows[node] = self.rows[node], {}
        for (start, end), amounts in rows.items():
            self.add(other, start, end, amounts[function])

    def remove(self, node: int) -> None:
        rows, self.rows[node] = self.rows[node], {}
        assert all(len(amounts) == 1 for amounts in rows.values()), f"node {node} leaves and its usage is still open"

    def limits(self) -> Ints:
        self.settle()
        return self.left

    def settle(self) -> None:
        if len(self.left):
            self.left = self.left - np.cumsum(self.steps[:-1])
            self.steps = np.zeros(len(self.left) + 1, dtype=np.int64)

    def tighten(self, nodes: Sequence[int]) -> dict[int, Ints] | None:
        """Forget limits that do not matter; the strategies to keep, of the nodes that lose some. None when nothing
        fits."""
        self.settle()
        if not len(self.left):
            return {}
        if self.left.min() < 0:
            return None
        rows = [(node, row) for node in nodes for row in self.rows_of(node)]
        starts = np.array([row.start for _, row in rows], dtype=np.int64)
        ends = np.array([row.end for _, row in rows], dtype=np.int64)
        most = np.array([row.amounts.max() for _, row in rows], dtype=np.int64)
        slack = range_minima(self.left, starts, ends)
        kept: dict[int, NDArray[np.bool_]] = {}
        for position in np.flatnonzero(most > slack):
            node, row = rows[position]
            fits = row.amounts <= slack[position]
            kept[node] = kept[node] & fits if node in kept else fits
        self.forget(nodes, matters(self.left, starts, ends, most))
        return {node: np.flatnonzero(fits) for node, fits in kept.items()}

    def forget(self, nodes: Sequence[int], kept: NDArray[np.bool_]) -> None:
        if kept.all():
            return
        places = np.concatenate(([0], np.cumsum(kept))).astype(np.int64)
        self.left = self.left[kept]
        self.places = self.places[kept]
        self.steps = np.zeros(len(self.left) + 1, dtype=np.int64)
        for node in nodes:
            rows, self.rows[node] = self.rows[node], {}
            for (start, end), amounts in rows.items():
                self.add(node, int(places[start]), int(places[end]), amounts)
        self.settle()


def range_minima(values: Ints, starts: Ints, ends: Ints) -> Ints:
    """Return the least value in each of the ranges [start, end), none of them empty."""
    if not len(starts):
        return np.zeros(0, dtype=np.int64)
    levels = [values]
    while 2 ** len(levels) <= len(values):
        width = 2 ** (len(levels) - 1)
        levels.append(np.minimum(levels[-1][:-width], levels[-1][width:]))
    level = np.floor(np.log2(ends - starts)).astype(np.int64)
    result = np.empty(len(starts), dtype=np.int64)
    for depth, minima in enumerate(levels):
        here = np.flatnonzero(level == depth)
        result[here] = np.minimum(minima[starts[here]], minima[ends[here] - 2**depth])
    return result


def matters(left: Ints, starts: Ints, ends: Ints, most: Ints) -> NDArray[np.bool_]:
    """Return the limits that can bind and that no neighbouring limit stands for."""
    steps = np.zeros(len(left) + 1, dtype=np.int64)
    np.add.at(steps, starts, most)
    np.add.at(steps, ends, -most)
    kept = np.asarray(np.cumsum(steps[:-1]) > left)
    begins = np.bincount(starts, minlength=len(left) + 1) > 0
    finishes = np.bincount(ends, minlength=len(left) + 1) > 0
    last: int | None = None
    some_begin = some_end = False
    for place in range(len(left)):
        some_begin |= bool(begins[place])
        some_end |= bool(finishes[place])
        if not kept[place]:
            continue
        if last is not None and not some_begin and left[last] <= left[place]:
            kept[place] = False  # all that use this limit use the last one too, which is no wider
            continue
        if last is not None and not some_end and left[place] <= left[last]:
            kept[last] = False
        last = place
        some_begin = some_end = False
    return kept
