"""How long a call takes on ranks that all make it, at once or in turns with computing.

All ranks measure at once, as they work at once in training: what they share, they share here too. Every time is a
median, of the faster half of the repetitions (what else the machine does only adds to them) and then of ranks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean, median

import torch
import torch.distributed as dist

__all__ = [
    "MeasuringBudget",
    "RankPlace",
    "own_seconds",
    "place_here",
    "ranks_per_core",
    "seconds_of",
    "waited_seconds",
]


@dataclass(frozen=True)
class MeasuringBudget:
    """How much is measured."""

    largest_bytes: int
    """Of a collective's buffer."""
    largest_product: int
    """Rows, columns and reduction."""
    seconds_each: float
    """Of repeating one measurement, about."""


@dataclass(frozen=True)
class RankPlace:
    """Where this process stands."""

    device: torch.device
    rank: int
    ranks: int
    ranks_per_node: int
    crowding: float = 1.0
    """How long a rank takes for a second of its own computing while all compute."""

    @property
    def nodes(self) -> int:
        return self.ranks // self.ranks_per_node


def place_here() -> RankPlace:
    together = dist.is_initialized()
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) if together else 1
    on_gpu = torch.cuda.is_available() and (not together or "nccl" in dist.get_backend())
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    place = RankPlace(device, rank, ranks, local if ranks % local == 0 else ranks)
    return replace(place, crowding=_crowding(place))


@contextmanager
def _still(place: RankPlace) -> Iterator[None]:
    """The device has nothing left to do, before and after."""
    if place.device.type == "cuda":
        torch.cuda.synchronize(place.device)
    yield
    if place.device.type == "cuda":
        torch.cuda.synchronize(place.device)


def own_seconds(place: RankPlace, budget: MeasuringBudget, run: Callable[[], object]) -> float:
    """The time of a call that waits for no other rank, of which there may be more than cores: what it needs of a core,
    and how long it takes to get that."""
    shared = ranks_per_core(place)
    if shared <= 1 or torch.get_num_threads() > 1:
        return max(1.0, shared) * seconds_of(place, budget, run)
    return place.crowding * seconds_of(place, budget, run, clock=time.process_time)


def _crowding(place: RankPlace) -> float:
    """No less than the ranks that share a core; more where the machine gives less than all of its cores."""
    if ranks_per_core(place) <= 1:
        return 1.0
    _compute()
    together(place)
    start = time.perf_counter()
    for _ in range(CROWDED):
        _compute()
    spent = mean(_of_all(place, time.perf_counter() - start))
    return max(ranks_per_core(place), spent / (CROWDED * COMPUTING_SECONDS))


CROWDED = 200


def ranks_per_core(place: RankPlace) -> float:
    """0 of ranks that compute on GPUs."""
    if place.device.type != "cpu":
        return 0.0
    return place.ranks_per_node * torch.get_num_threads() / len(os.sched_getaffinity(0))


def _undisturbed(times: list[float]) -> float:
    """The median of the faster half; -1 of none."""
    return median(sorted(times)[: (len(times) + 1) // 2]) if times else -1.0


def waited_seconds(
    place: RankPlace, budget: MeasuringBudget, runs: Mapping[str, Callable[[], object]]
) -> dict[str, float]:
    """The times of calls that wait for other ranks.

    Where ranks share cores, a call waits for some that still compute, and takes a core from others: what counts is how
    much longer computing takes with the call after it, and not by the median, as over a step all of it adds up. The
    calls take turns, so that a machine that drifts drifts for all.
    """
    if ranks_per_core(place) <= 1:
        return {name: seconds_of(place, budget, run) for name, run in runs.items()}
    together(place)
    longest = max(_of_all(place, sum(_timed(place, run, 1, time.perf_counter) for run in runs.values())))
    room = longest + len(runs) * ranks_per_core(place) * COMPUTING_SECONDS
    rounds = max(3, min(50, int(len(runs) * budget.seconds_each / room)))
    totals = dict.fromkeys(runs, 0.0)
    alone = 0.0
    together(place)
    for _ in range(rounds):
        alone += _timed(place, _compute, 1, time.perf_counter)
        for name, run in runs.items():
            totals[name] += _timed(place, partial(_computed_and, run), 1, time.perf_counter)
    found = {}
    for name, total in totals.items():
        more = mean(_of_all(place, total - alone)) / rounds
        found[name] = max(more, total / rounds / 100)
    return found


COMPUTING_SECONDS = 2e-3
"""Between two collectives, of a core: about as long as models compute that are trained on a few processes of a CPU."""


def _computed_and(run: Callable[[], object]) -> None:
    _compute()
    run()


def _compute() -> None:
    square = torch.ones(128, 128)
    until = time.process_time() + COMPUTING_SECONDS
    while time.process_time() < until:
        torch.mm(square, square)


def seconds_of(
    place: RankPlace,
    budget: MeasuringBudget,
    run: Callable[[], object],
    active: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """The time of a call; ranks that are not active wait for the others."""
    times: list[float] = []
    if active:
        run()
    together(place)
    first = _timed(place, run, 1, time.perf_counter) if active else 0.0
    # As often on every rank: the slowest decides. A GPU is given several calls at a time, so that none waits for us.
    longest = max(1e-9, *_of_all(place, first))
    inside = max(1, min(20, int(1e-3 / longest))) if place.device.type == "cuda" else 1
    repetitions = max(3, min(50, int(budget.seconds_each / (longest * inside))))
    together(place)
    if active:
        times = [_timed(place, run, inside, clock) for _ in range(repetitions)]
    return median(spent for spent in _of_all(place, _undisturbed(times)) if spent >= 0)


def _timed(place: RankPlace, run: Callable[[], object], count: int, clock: Callable[[], float]) -> float:
    with _still(place):
        start = clock()
        for _ in range(count):
            run()
        if place.device.type == "cuda":
            torch.cuda.synchronize(place.device)
        return (clock() - start) / count


def together(place: RankPlace) -> None:
    if place.ranks > 1:
        dist.barrier()


def _of_all(place: RankPlace, value: float) -> list[float]:
    if place.ranks == 1:
        return [value]
    found: list[float] = [0.0] * place.ranks
    dist.all_gather_object(found, value)
    return found
