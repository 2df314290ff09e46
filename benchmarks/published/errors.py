"""Errors of predicted step times by kind of run, from one half of the published runs; the other half judges them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import exp, log

from autopar.cost.hardware.cluster import load_cluster
from autopar.cost.network import Network
from autopar.cost.step_errors import ANY, COVERED, RunKind, StepErrors, errors_of
from autopar.cost.time_range import kind_of_run
from autopar.submesh import SubMesh
from benchmarks.published.priced import Priced, half_of
from benchmarks.published.runs import Run

__all__ = [
    "Covered",
    "RunError",
    "by_other_groups",
    "by_other_tables",
    "errors_by_kind",
    "held_back",
    "kind_of",
    "run_errors",
]

# Runs of a kind without which its quantiles say nothing.
FEWEST = 10
# Pairs of runs are alternatives of one search if their predicted times differ by less.
ALTERNATIVES = 2.0


def kind_of(run: Run) -> RunKind:
    cluster = load_cluster(run.cluster)
    network = Network(cluster, SubMesh({"pp": run.pp, "dp": run.dp, "tp": run.tp}))
    bits = 8 if run.software.linears else 8 * run.decoder.dtype.itemsize
    return kind_of_run(cluster, network, run.pp > 1, bits)


@dataclass(frozen=True)
class RunError:
    """A measured run beside its prediction."""

    kind: RunKind
    # Alternatives of one search have equal groups.
    group: tuple[Hashable, ...]
    devices: int
    predicted_seconds: float
    measured_seconds: float

    @property
    def value(self) -> float:
        """Return the logarithm of the measured over the predicted time."""
        return log(self.measured_seconds / self.predicted_seconds)


def run_errors(priced: Iterable[Priced]) -> list[RunError]:
    """Return the errors of all whole steps that have a measured time."""
    found = []
    for one in priced:
        run, measured = one.run, one.run.measured.step_seconds
        if measured is not None and not run.one_block:
            group = run.group, run.tokens
            found.append(RunError(kind_of(run), group, run.devices, one.step_seconds, measured))
    return found


def errors_by_kind(errors: Iterable[RunError]) -> tuple[StepErrors, ...]:
    """Return the errors of each kind of which there are enough runs, and those of wider kinds."""
    by_kind: dict[RunKind, list[RunError]] = defaultdict(list)
    for one in errors:
        for kind in dict.fromkeys(one.kind.wider()):
            by_kind[kind].append(one)
    found = [_of_kind(kind, errors) for kind, errors in by_kind.items() if len(errors) >= FEWEST]
    return tuple(sorted(found, key=lambda one: (one.kind.device == ANY, *vars(one.kind).values())))


def _of_kind(kind: RunKind, errors: Sequence[RunError]) -> StepErrors:
    values = sorted(one.value for one in errors)
    low, high = ((1 - COVERED) / 2, (1 + COVERED) / 2)
    pairs = list(_alternatives(errors))
    # Where too few runs are alternatives, runs of different models stand for them.
    apart = sorted(abs(a.value - b.value) for a, b in (pairs if len(pairs) >= FEWEST else combinations(errors, 2)))
    return StepErrors(
        kind,
        len(errors),
        max(one.devices for one in errors),
        exp(_quantile(values, low)),
        exp(_quantile(values, high)),
        exp(_quantile(apart, COVERED)),
    )


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Return a value below which this share of further runs is expected, between two values in proportion.

    Of n values and a further one, each of the n + 1 places is as likely: the extremes of few values count for more.
    """
    place = min(max(share * (len(ordered) + 1) - 1, 0.0), len(ordered) - 1.0)
    under = int(place)
    over = min(under + 1, len(ordered) - 1)
    return ordered[under] + (place - under) * (ordered[over] - ordered[under])


def _alternatives(errors: Sequence[RunError]) -> Iterator[tuple[RunError, RunError]]:
    """Yield pairs of runs that a search would choose between: equal work, and predicted times that are near."""
    groups: dict[tuple[Hashable, ...], list[RunError]] = defaultdict(list)
    for one in errors:
        groups[one.group].append(one)
    for group in groups.values():
        for one, other in combinations(group, 2):
            if _ratio(one, other) < ALTERNATIVES:
                yield one, other


# -- judging -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Covered:
    """Share of runs that lie in the ranges of their kinds, and of pairs whose order the noise allows to be certain."""

    name: str
    runs: int
    inside: float | None
    # Pairs of alternatives whose predicted times are further apart than the noise, and the share in the right order.
    pairs: int
    in_order: float | None


def covered(name: str, errors: Iterable[RunError], known: tuple[StepErrors, ...]) -> Covered:
    """Judge the ranges of runs that had no part in them."""
    runs = [(one, found) for one in errors if (found := errors_of(one.kind, known))]
    inside = [found.low <= exp(one.value) <= found.high for one, found in runs]
    noise = {id(one): found.apart for one, found in runs}
    apart = [
        a.predicted_seconds < b.predicted_seconds
        for one, other in _alternatives([one for one, _ in runs])
        for a, b in (sorted((one, other), key=lambda error: error.measured_seconds),)
        if _ratio(one, other) >= max(noise[id(one)], noise[id(other)])
    ]
    return Covered(name, len(runs), _share(inside), len(apart), _share(apart))


def _ratio(one: RunError, other: RunError) -> float:
    times = one.predicted_seconds, other.predicted_seconds
    return max(times) / min(times)


def _share(outcomes: Sequence[bool]) -> float | None:
    return sum(outcomes) / len(outcomes) if outcomes else None


def held_back(tables: Mapping[str, Sequence[Priced]], known: tuple[StepErrors, ...]) -> list[Covered]:
    """Judge the ranges by the half of the runs that they are not from: all of them, by table, and by kind."""
    held = {name: run_errors(one for one in priced if half_of(one.run) == "held") for name, priced in tables.items()}
    every = [one for errors in held.values() for one in errors]
    parts = {"ranges, all held-back runs": every, **{f"ranges, {name}": errors for name, errors in held.items()}}
    # Kinds that differ in the width of their dtype alone have one text.
    for text in sorted({one.kind.text for one in every}):
        parts[f"ranges, {text}"] = [one for one in every if one.kind.text == text]
    return [found for name, errors in parts.items() if (found := covered(name, errors, known)).runs]


def by_other_tables(tables: Mapping[str, Sequence[Priced]]) -> list[Covered]:
    """Judge the ranges that a table's runs get from all other tables: those of software that nobody measured."""
    by_table = {name: run_errors(priced) for name, priced in tables.items()}
    return [one for one in by_other_groups("ranges from all other tables", by_table) if one.runs]


def by_other_groups(name: str, groups: Mapping[str, Sequence[RunError]]) -> list[Covered]:
    """Judge the ranges that each group of runs gets from all other groups."""
    found = []
    for group, errors in groups.items():
        others = errors_by_kind([one for other, rows in groups.items() if other != group for one in rows])
        found.append(covered(f"{name}, {group}", errors, others))
    return found
