"""Mixtures of two assignments: one up to some place of the graph, the other from there on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from autopar.solver.arrays import Floats, Ints
from autopar.solver.model.model import EqualTerms, Model, TermGroup, distinct_rows
from autopar.solver.model.objective import Hinges, Sum, every_peak_gib

__all__ = ["Splices", "places_of"]


@dataclass
class Splices:
    """All of one pair, with their sums and their seconds, and what is believed that is missed of their memory.

    What is missed is known of those that are priced; between two of them it is taken to change evenly. Before one is
    priced, what is counted is believed.
    """

    first: Sequence[int]
    then: Sequence[int]
    places: Ints
    """Of every variable."""
    sums: Floats
    """A row for each place of the graph: before it all is as in the first assignment."""
    seconds: Floats
    worth: Floats
    """The same, but of those that are like the one before, or known."""
    missed_gib: dict[int, float] = field(default_factory=dict)
    """By place, in no order."""
    _least: dict[float, tuple[float, int]] = field(default_factory=dict)
    """At a limit, until more is told."""

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
        """The least seconds of those that are not known and are believed to fit, and the place."""
        if limit_gib not in self._least:
            known = sorted(self.missed_gib)
            told = [self.missed_gib[place] for place in known]
            missed = np.interp(np.arange(len(self.sums)), known or [0], told or [0.0])
            worth = np.where(self.peak_gib + missed <= limit_gib, self.worth, np.inf)
            self._least = {limit_gib: (float(worth.min()), int(worth.argmin()))}
        return self._least[limit_gib]

    @cached_property
    def peak_gib(self) -> Floats:
        return every_peak_gib(self.sums)

    def tell(self, place: int, missed_gib: float) -> None:
        """One is priced, and is not to be found again."""
        self.missed_gib[place] = missed_gib
        self.worth[place] = np.inf
        self._least = {}


def _every_sums(model: Model, places: Ints, first: Sequence[int], then: Sequence[int]) -> Floats:
    """From one place to the next: what changes with the variables that it has."""
    changes = np.zeros((int(places.max(initial=0)) + 2, len(Sum)))
    changes[0] = model.sums(then)
    for alike in (model.costs, model.tables):
        for group in alike.groups:
            _add_changes(changes, alike, group, places[group.scopes], np.asarray(first), np.asarray(then))
    return changes.cumsum(axis=0)


def _add_changes(changes: Floats, alike: EqualTerms, group: TermGroup, places: Ints, first: Ints, then: Ints) -> None:
    """Of terms over so many variables: each changes with one of them after the other."""
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
    """What changes as one variable after the other does."""
    now, last, found = before.copy(), term.at(*before), []
    for axis in order:
        now[axis] = after[axis]
        sums = term.at(*now)
        found.append(sums - last)
        last = sums
    return found


def places_of(model: Model) -> Ints:
    """Where in the graph a variable belongs: an op in its place, a value with its producer, a tensor with its first
    user, a layer where it begins."""
    graph = model.setting.graph
    by_node = {node.node: node.name for node in graph.nodes}
    rank = {node.name: place for place, node in enumerate(graph.nodes)}
    makers = {name: rank[node.name] for node in graph.nodes for name in node.outputs if name is not None}
    begins = {
        path: min(rank[by_node[name]] for name in layer if name in by_node)
        for repeat in graph.repeats
        for path, layer in zip(repeat.module_paths, repeat.layers, strict=True)
    }
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
