"""A problem as a few flat arrays, for loops that are compiled."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from autopar.errors import AutoparWarning
from autopar.solver import Floats, Ints
from benchmarks.contest.problem import Problem

__all__ = ["COMPILED", "Arrays", "arrays_of", "compiled", "impossible_price", "priced_costs", "warn_if_slow"]


# -- compiled loops ----------------------------------------------------------------------------------------------------


F = TypeVar("F", bound=Callable[..., Any])

numba: Any
# Why numba cannot be imported.
REASON = ""
try:
    import numba
except (
    ImportError,
    OSError,
    SystemError,
    AttributeError,
) as error:  # a numpy that it does not know raises any of these
    numba, REASON = None, f"{type(error).__name__}: {error}"

COMPILED: bool = numba is not None and not numba.config.DISABLE_JIT


def compiled(function: F) -> F:
    """Return the function, compiled at its first call."""
    if numba is None:
        return function
    try:
        return cast(F, numba.njit(cache=True, nogil=True)(function))
    except RuntimeError:  # there is no folder where compiled code could be kept
        return cast(F, numba.njit(nogil=True)(function))


def warn_if_slow() -> None:
    """Warn where the loops are about to run as plain Python: in the time of a search they then find much less."""
    if numba is None:
        reason = REASON.partition("\n")[0]
        warnings.warn(
            f"numba cannot be imported ({reason}): the search runs some hundred times slower, and finds worse "
            "answers in its time\nfix: pip install numba",
            AutoparWarning,
            stacklevel=2,
        )


class Arrays(NamedTuple):
    """Strategies of all nodes are numbered through: node i owns offsets[i] .. offsets[i+1]-1 ("places").

    Every edge is listed from both ends: node i owns links[i] .. links[i+1]-1. Link k leads to neighbours[k]; its costs,
    a row per strategy of i, begin at values[blocks[k]]; messages that arrive over it begin at inboxes[k]; reverses[k]
    is the link back. Usages: node i owns rows[i] .. rows[i+1]-1; row r takes amounts[row_amounts[r] + s] of limits
    row_starts[r] .. row_ends[r]-1.
    """

    offsets: Ints
    costs: Floats
    links: Ints
    neighbours: Ints
    blocks: Ints
    inboxes: Ints
    reverses: Ints
    values: Floats
    rows: Ints
    row_starts: Ints
    row_ends: Ints
    row_amounts: Ints
    amounts: Ints
    limits: Ints


def arrays_of(problem: Problem) -> Arrays:
    """Flatten; impossible costs become a price above the spread of all possible ones."""
    counts = np.array(problem.strategy_counts, dtype=np.int64)
    price = impossible_price(problem)
    starts: dict[tuple[int, bool], int] = {}
    chunks: list[Floats] = []
    links: list[list[tuple[int, int]]] = [[] for _ in problem.costs]
    used = 0
    for edge in problem.edges:
        for node, other, flipped in ((edge.first, edge.second, False), (edge.second, edge.first, True)):
            key = (id(edge.costs), flipped)
            if key not in starts:
                starts[key] = used
                chunks.append((edge.costs.T if flipped else edge.costs).ravel())
                used += edge.costs.size
            links[node].append((other, starts[key]))
    for node_links in links:
        node_links.sort()
    first_links = _starts([len(node_links) for node_links in links])
    neighbours = _ints(other for node_links in links for other, _ in node_links)
    sources = np.repeat(np.arange(len(counts)), np.diff(first_links))
    rows: list[list[Any]] = [[] for _ in problem.costs]
    for usage in problem.usages:
        rows[usage.node].append(usage)
    flat_rows = [usage for node_rows in rows for usage in node_rows if usage.start < usage.end]
    return Arrays(
        offsets=_starts(counts),
        costs=np.minimum(_joined(problem.costs, np.float64), price),
        links=first_links,
        neighbours=neighbours,
        blocks=_ints(start for node_links in links for _, start in node_links),
        inboxes=_starts(counts[sources])[:-1],
        reverses=_reverses(sources, neighbours),
        values=np.minimum(_joined(chunks, np.float64), price),
        rows=_starts([sum(usage.start < usage.end for usage in node_rows) for node_rows in rows]),
        row_starts=_ints(usage.start for usage in flat_rows),
        row_ends=_ints(usage.end for usage in flat_rows),
        row_amounts=_starts([len(usage.amounts) for usage in flat_rows])[:-1],
        amounts=_joined([usage.amounts for usage in flat_rows], np.int64),
        limits=problem.limits,
    )


def impossible_price(problem: Problem) -> float:
    spread = 1.0
    seen: dict[int, float] = {}
    for costs in [*problem.costs, *(edge.costs for edge in problem.edges)]:
        if id(costs) not in seen:
            finite = costs[np.isfinite(costs)]
            seen[id(costs)] = float(finite.max() - finite.min()) + abs(float(finite.max())) if len(finite) else 0.0
        spread += seen[id(costs)]
    return min(spread, 2.0**50)  # sums of larger numbers would lose the units


def priced_costs(arrays: Arrays, prices: Floats) -> Floats:
    """Return the node costs with every unit of usage charged at the price of its limit."""
    paid = np.concatenate(([0.0], np.cumsum(prices)))
    row_prices = paid[arrays.row_ends] - paid[arrays.row_starts]
    nodes = np.repeat(np.arange(len(arrays.offsets) - 1), np.diff(arrays.rows))
    counts = np.diff(arrays.offsets)[nodes]
    places = np.repeat(arrays.offsets[:-1][nodes] - arrays.row_amounts, counts) + np.arange(int(counts.sum()))
    charged = np.bincount(places, np.repeat(row_prices, counts) * arrays.amounts, len(arrays.costs))
    return np.asarray(arrays.costs + charged)


def _reverses(sources: Ints, neighbours: Ints) -> Ints:
    """Links are sorted by source, then neighbour; where the same pair stands the other way round."""
    forward = np.lexsort((neighbours, sources))
    backward = np.lexsort((sources, neighbours))
    reverses = np.empty(len(sources), dtype=np.int64)
    reverses[backward] = forward
    return reverses


def _starts(counts: Any) -> Ints:
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)))


def _ints(values: Any) -> Ints:
    return np.fromiter(values, dtype=np.int64)


def _joined(parts: Any, kind: type) -> NDArray[Any]:
    parts = [part.ravel() for part in parts]
    return np.concatenate(parts).astype(kind) if parts else np.zeros(0, dtype=kind)
