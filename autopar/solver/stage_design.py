"""Design of a pipeline from the costs of segments: cuts, recompute modes and the time of a step under a schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np

from autopar.cost.hardware.cluster import Cluster
from autopar.cost.overlap import ChunkTraffic
from autopar.cost.pipeline import PartTimes, run_stages
from autopar.sharding.schedules import Schedule, StageOrders, most_kept, orders
from autopar.sharding.stage_cuts import balanced
from autopar.solver import Floats, Ints
from autopar.solver.model.recompute_variables import mode_counts
from autopar.solver.segments import ModelCosts

__all__ = ["SCHEDULES", "ScheduleChoice", "StageDesign", "design_stages", "least_seconds"]

# Schedule, chunks of a stage, micro-batches more in flight.
ScheduleChoice = tuple[Schedule, int, int]

# Schedules of `pipeline pp ?`.
SCHEDULES: tuple[ScheduleChoice, ...] = (
    ("1f1b", 1, 0),
    ("1f1b", 1, 1),
    ("zero_bubble", 1, 0),
    *(("interleaved", chunks, 0) for chunks in range(2, 9)),
)

# Cuts follow the times with the modes, which follow the cuts.
ROUNDS = 3
# Rounds of micro-batches that are simulated; the others take as long as the last ones.
SIMULATED = 4


@dataclass(frozen=True)
class StageDesign:
    """Stages of a model under one schedule."""

    schedule: ScheduleChoice
    stages: int
    # Segments that begin the later parts.
    starts: tuple[int, ...]
    # Recompute mode of each segment, as a place in STATES.
    modes: tuple[int, ...]
    seconds: float
    # Most memory of each stage.
    stage_peaks: tuple[float, ...]

    @property
    def peak_bytes(self) -> float:
        return max(self.stage_peaks)


def least_seconds(work_seconds: float, stages: int, count: int, layers: int) -> float:
    """Return the least time of a step whose stages share some work equally, under the schedule that waits least."""
    chunks = max((chunks for _, chunks, _ in SCHEDULES if chunks * stages <= layers), default=1)
    # `zero_bubble` fills up to half of the waiting time.
    return work_seconds * (1 + (stages - 1) / (count * max(2, chunks if count % stages == 0 else 1)))


def design_stages(
    costs: ModelCosts,
    cluster: Cluster,
    stages: int,
    count: int,
    choice: ScheduleChoice,
    limit: Sequence[float],
    send_seconds: Floats,
    beat_seconds: float = math.inf,
) -> StageDesign | None:
    """Return the fastest stages found for a schedule that keep the memory limit of each; None if there are none.

    `send_seconds` are those of the values behind each segment. Stages that are surely no faster than `beat_seconds` are
    left out.
    """
    schedule, chunks, more = choice
    parts = stages * chunks
    if parts > len(costs.sequence) or (chunks > 1 and count % stages) or (stages > 1 and count < 2):
        return None
    shown = min(count, SIMULATED * stages)
    every = orders(stages, shown, schedule, chunks, more, halves=True)
    flights = _flights(stages, shown, schedule, chunks, more)
    work, best = costs.seconds[0], None
    for _ in range(ROUNDS):
        starts = _cuts(work, parts)
        found = _fitting_modes(costs, starts, stages, flights, limit)
        if found is None:
            return best
        modes, peaks = found
        work = np.take_along_axis(costs.seconds, modes[None], axis=0)[0]
        if count * float(work.sum()) / stages >= beat_seconds:
            return best
        if _least_seconds(costs, modes, starts, stages, count, schedule, cluster) >= beat_seconds:
            continue  # other cuts may share the work better
        seconds = _seconds(costs, cluster, starts, stages, modes, every, count, send_seconds, choice)
        if best is not None and seconds >= best.seconds:
            break
        best = StageDesign(choice, stages, tuple(starts), tuple(modes.tolist()), seconds, tuple(peaks))
    return best


@cache
def _flights(stages: int, count: int, schedule: Schedule, chunks: int, more: int) -> list[float]:
    """Return the most micro-batches that each stage keeps at once."""
    every = orders(stages, count, schedule, chunks, more, halves=True)
    return [most_kept(order, chunks, 1.0, 1.0 if schedule == "zero_bubble" else 0.0) for order in every]


def _cuts(work: Floats, parts: int) -> list[int]:
    until = [0.0, *np.cumsum(work).tolist()]
    return balanced(until, range(1, len(work)), [0.0] * parts) if parts > 1 else []


def _runs(starts: Sequence[int], stages: int, count: int) -> list[Ints]:
    """Return the segments of each stage."""
    bounds = [0, *starts, count]
    found: list[list[int]] = [[] for _ in range(stages)]
    for part, (first, last) in enumerate(pairwise(bounds)):
        found[part % stages].extend(range(first, last))
    return [np.array(each, dtype=np.int64) for each in found]


def _fitting_modes(
    costs: ModelCosts, starts: Sequence[int], stages: int, flights: Sequence[float], limit: Sequence[float]
) -> tuple[Ints, list[float]] | None:
    """Return the fastest modes of the layers of each stage that its memory allows, and the memory of each stage."""
    modes, peaks = np.zeros(len(costs.sequence), dtype=np.int64), list[float]()
    saved, passing = costs.column("saved_bytes"), costs.column("transient_bytes")
    held = (costs.column("stored_bytes") + costs.column("gradient_bytes") + costs.column("results_bytes"))[0]
    for own, flight, most in zip(_runs(starts, stages, len(modes)), flights, limit, strict=True):
        layers, others = own[costs.is_layer[own]], own[~costs.is_layer[own]]
        ways = _ways(len(layers), len(costs.seconds))
        shares = ways / max(1, len(layers))
        fixed = costs.inputs_bytes + held[own].sum() + flight * saved[0, others].sum()
        most_passing = np.where(ways > 0, passing[:, own].max(axis=1), 0.0).max(axis=1, initial=passing[0, own].max())
        sizes = fixed + flight * (shares @ saved[:, layers].sum(axis=1)) + most_passing
        seconds = np.where(sizes <= most, shares @ costs.seconds[:, layers].sum(axis=1), np.inf)
        place = int(seconds.argmin())
        if not np.isfinite(seconds[place]):
            return None
        peaks.append(float(sizes[place]))
        # Layers that recompute most come first: their backwards come last, when least is saved.
        modes[layers] = np.repeat(np.arange(len(costs.seconds))[::-1], ways[place][::-1])
    return modes, peaks


@cache
def _ways(count: int, modes: int) -> Ints:
    """Return the numbers of layers in each mode, in every way."""
    return np.array(mode_counts(count, modes), dtype=np.int64)


def _seconds(
    costs: ModelCosts,
    cluster: Cluster,
    starts: Sequence[int],
    stages: int,
    modes: Ints,
    every: StageOrders,
    count: int,
    send_seconds: Floats,
    choice: ScheduleChoice,
) -> float:
    """Return the time of a step."""
    bounds = [0, *starts, len(modes)]
    times = _part_times(costs, modes, bounds[:-1])
    sends = send_seconds[np.array(bounds[1:]) - 1].tolist()
    reduced = run_stages(times, sends, every, cluster).reduced
    # The other micro-batches take as long as the busiest stage.
    shown = 1 + max(task.micro_batch for task in every[0])
    own = [times[stage::stages] for stage in range(stages)]
    each = max(sum(part.forward + part.backward for part in mine) for mine in own)
    if count > shown > stages and 2 * max(sends) > each:
        # On a slow link they take as long as the messages let the last of those that are simulated.
        schedule, chunks, more = choice
        fewer = orders(stages, shown - stages, schedule, chunks, more, halves=True)
        before = run_stages(times, sends, fewer, cluster).reduced
        each = max(each, (max(reduced) - max(before)) / stages)
    optimizer = max(sum(part.optimizer for part in mine) for mine in own)
    return max(reduced) + (count - shown) * each + optimizer


def _least_seconds(
    costs: ModelCosts,
    modes: Ints,
    starts: Sequence[int],
    stages: int,
    count: int,
    schedule: Schedule,
    cluster: Cluster,
) -> float:
    """Return the least time of a step: that of the work of each stage, and of waiting for the parts before its first.

    While a stage waits for their backwards it may run gradients of weights that it put off. Stages that share cores do
    not lose the time in which they wait.
    """
    forward, backward = (
        np.add.reduceat(np.take_along_axis(costs.column(name), modes[None], axis=0)[0], [0, *starts])
        for name in ("forward", "backward")
    )
    own = [float((forward + backward)[stage::stages].sum()) for stage in range(stages)]
    if cluster.device.core_fraction < 1.0:
        return count * sum(own) / stages
    waited = forward if schedule == "zero_bubble" else forward + backward
    before = [0.0, *np.cumsum(waited).tolist()]
    return float(max(count * seconds + before[stage] for stage, seconds in enumerate(own)))


def _part_times(costs: ModelCosts, modes: Ints, starts: Sequence[int]) -> list[PartTimes]:
    """Return the times of the parts that begin with these segments: the sums over their segments."""

    def sums(names: Sequence[str]) -> list[list[float]]:
        columns = (np.take_along_axis(costs.column(name), modes[None], axis=0)[0] for name in names)
        return [np.add.reduceat(column, starts).tolist() for column in columns]

    traffic = [ChunkTraffic(*numbers) for numbers in zip(*sums(ChunkTraffic._fields), strict=True)]
    forward, backward, late, last, optimizer = sums(("forward", "backward", "late", "last", "optimizer"))
    return [PartTimes(*numbers) for numbers in zip(forward, backward, late, traffic, last, optimizer, strict=True)]
