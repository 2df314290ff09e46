"""Splices of two assignments: one up to some place of the graph, the other after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from autopar.solver import Floats, Ints
from autopar.solver.model.model import EqualTerms, Model, TermGroup, distinct_rows
from autopar.solver.model.objective import Hinges, Sum, every_peak_gib

__all__ = ["Splices", "places_of"]


@dataclass
class Splices:
    """All splices of one pair, with their sums and seconds, and the errors of their estimates.

    Errors of memory and of seconds are known at priced places and interpolated linearly between them; without a priced
    place they are taken as zero.
    """

    first: Sequence[int]
    then: Sequence[int]
    # States of every variable in the two assignments.
    places: Ints
    # A row of sums for each place: before it all variables are as in the first assignment.
    sums: Floats
    seconds: Floats
    # The same without splices that equal the one before, or are priced.
    worth: Floats
    # Errors of memory and of seconds at priced places, unordered.
    errors: dict[int, tuple[float, float]] = field(default_factory=dict)
    # Result of `least` by limit, until another splice is priced.
    _least: dict[float, tuple[float, int]] = field(default_factory=dict)

    @staticmethod
    def of(model: Model, hinges: Hinges, places: Ints, first: Sequence[int], then: Sequence[int]) -> Splices:
        sums = _every_sums(model, places, first, then)
        seconds = hinges.every_seconds(sums)
        changes = places[np.asarray(first) != np.asarray(then)] + 1
        worth = np.full(len(seconds), np.inf)
        worth[changes] = seconds[changes]
        return Splices(first, then, places, sums, seconds, worth)

    def at(self, place: int) -> list[int]:
        return np.where(self.places < place, self.first, self.then).tolist()  # type: ignore[no-any-return]

    def least(self, limit_gib: float) -> tuple[float, int]:
        """Return the least seconds of the unpriced splices that are estimated to fit, and the place."""
        if limit_gib not in self._least:
            known = sorted(self.errors)
            told = [self.errors[place] for place in known] or [(0.0, 0.0)]
            gib, late = (np.interp(np.arange(len(self.sums)), known or [0], one) for one in zip(*told, strict=True))
            worth = np.where(self.peak_gib + gib <= limit_gib, self.worth + late, np.inf)
            self._least = {limit_gib: (float(worth.min()), int(worth.argmin()))}
        return self._least[limit_gib]

    @cached_property
    def peak_gib(self) -> Floats:
        return every_peak_gib(self.sums)

    def tell(self, place: int, error_gib: float, seconds: float) -> None:
        """Record the errors of a priced splice, and exclude it from `least`."""
        self.errors[place] = error_gib, seconds - self.seconds[place] if np.isfinite(seconds) else 0.0
        self.worth[place] = np.inf
        self._least = {}


def _every_sums(model: Model, places: Ints, first: Sequence[int], then: Sequence[int]) -> Floats:
    """Return the sums of the splice at every place, by adding the changes of each place's variables."""
    changes = np.zeros((int(places.max(initial=0)) + 2, len(Sum)))
    changes[0] = model.sums(then)
    for alike in (model.costs, model.tables):
        for group in alike.groups:
            _add_changes(changes, alike, group, places[group.scopes], np.asarray(first), np.asarray(then))
    return changes.cumsum(axis=0)


def _add_changes(changes: Floats, alike: EqualTerms, group: TermGroup, places: Ints, first: Ints, then: Ints) -> None:
    """Add the changes of terms over several variables: each changes with one variable after the other."""
    before, after = then[group.scopes], first[group.scopes]
    differs = (before != after).any(axis=1)
    order = np.argsort(places, axis=1, kind="stable")
    every = np.column_stack([group.kinds, before, after, order])[differs]
    distinct, which, _ = distinct_rows(every)
    rows, count = every[distinct], places.shape[1]
    steps = np.array([_steps(alike.terms[row[0]], *np.split(row[1:], 3)) for row in rows]).reshape(-1, count, len(Sum))
    where = np.take_along_axis(places, order, axis=1)[differs] + 1
    np.add.at(changes, where, steps[which])


def _steps(term: Any, before: Ints, after: Ints, order: Ints) -> list[Floats]:
    """Yield the changes of one term as one variable after the other changes."""
    now, last, found = before.copy(), term.at(*before), []
    for axis in order:
        now[axis] = after[axis]
        sums = term.at(*now)
        found.append(sums - last)
        last = sums
    return found


def places_of(model: Model) -> Ints:
    """Return the place of each variable in the graph.

    An op has its own place, a value that of its producer, a tensor that of its first user, a layer that of its first
    op.
    """
    graph = model.setting.graph
    rank = {node.name: place for place, node in enumerate(graph.nodes)}
    makers = {name: rank[node.name] for node in graph.nodes for name in node.outputs if name is not None}
    begins = {path: min(map(rank.__getitem__, ops)) for path, ops in graph.ops_of_layers.items()}
    found = []
    for variable in model.variables:
        if variable.kind == "op":
            found.append(rank[variable.name])
        elif variable.kind == "value":
            found.append(makers[variable.name])
        elif variable.kind == "recompute":
            found.append(begins[variable.name])
        else:
            users = model.setting.users.get(variable.name, ())
            found.append(rank[users[0].name] if users else 0)
    return np.array(found, dtype=np.int64)
