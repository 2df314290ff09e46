"""Communication of parameters beside compute: its cost in one micro-batch, and beside the tasks of a stage."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autopar.cost.hardware.cluster import Cluster
from autopar.sharding.schedules import BackwardHalf, StageTask, TaskKind


class OverlapCost(NamedTuple):
    """Cost of communication in parallel with compute: sent - overlapped + κ overlapped, overlapped <= η compute.

    Written as κ sent + (1 - κ) max(0, sent - η compute) the formula is convex: a linear part and a hinge, which is the
    form of the solver's objective.
    """

    # η: share of the compute time that the library can use.
    overlap_fraction: float
    # κ: share of the processors that communication occupies.
    occupied: float

    @staticmethod
    def of(cluster: Cluster) -> OverlapCost:
        matrix = cluster.device.matrix
        occupied = cluster.library.processors / matrix.processors if matrix is not None else 0.0
        return OverlapCost(cluster.library.overlap_fraction, occupied)

    def seconds(self, sent_seconds: float, compute_seconds: float) -> float:
        """Return how much longer compute takes with communication beside it."""
        overlapped = min(sent_seconds, self.overlap_fraction * compute_seconds)
        return sent_seconds - overlapped + self.occupied * overlapped


class ChunkTraffic(NamedTuple):
    """Seconds of gathers and reductions of one chunk, and those that one pass of it leaves room for."""

    gathers: float
    reductions: float
    forward_room: float
    backward_room: float
    # Of the backward, the gradients of weights that the schedule puts off.
    late_room: float

    def room(self, task: StageTask) -> float:
        """Return the seconds of communication that fit beside a task."""
        if task.kind is TaskKind.FORWARD:
            return self.forward_room
        if task.half is BackwardHalf.WEIGHTS:
            return self.late_room
        return max(0.0, self.backward_room - (self.late_room if task.half is BackwardHalf.INPUTS else 0.0))


class TrafficTime(NamedTuple):
    """Gathers or reductions of one chunk, with their begin and end."""

    kind: str
    start_seconds: float
    end_seconds: float


@dataclass
class _Pending:
    kind: str
    chunk: int
    left: float
    begin: float | None = None


class StageTraffic:
    """Gathers and reductions of one stage in a step, one after the other, while its tasks run.

    Gathers begin with the step. The first forward of a chunk needs those of the chunk, bucket by bucket, so they run
    beside it. Reductions of a chunk begin in its last backward, or later (`reductions_after`). A stage that waits
    leaves all its time to them.
    """

    def __init__(self, chunks: Sequence[ChunkTraffic], occupied: float) -> None:
        self.chunks, self.occupied = chunks, occupied
        self.queue = deque(_Pending("gathers", i, one.gathers) for i, one in enumerate(chunks) if one.gathers)
        self.now = 0.0
        self.ran: list[TrafficTime] = []
        # Seconds by which tasks took longer.
        self.added_seconds = 0.0

    def added(self, task: StageTask, ready: float, start: float, seconds: float, reduced: int) -> float:
        """Return by how much a task takes longer that begins at a time and takes some seconds.

        The stage waits from `ready` on. Gradients of the chunk `reduced` are reduced from here on: within the task
        where they are its own, before it where they are of an earlier one. Tasks may be left out while nothing is in
        the queue.
        """
        chunk = self.chunks[task.chunk]
        self.now = max(self.now, ready)
        if reduced not in (-1, task.chunk):
            self._reduce(reduced)
        self._send(start, start - self.now)
        if reduced == task.chunk:
            self._reduce(reduced)
        self.now = max(self.now, start)
        end = start + seconds
        more = self.occupied * self._send(end, chunk.room(task))
        if task.kind is TaskKind.FORWARD and task.micro_batch == 0:
            missing = sum(one.left for one in self.queue if one.kind == "gathers" and one.chunk <= task.chunk)
            more += self._send(end + more + missing, missing)
        self.now = end + more
        self.added_seconds += more
        return more

    def _reduce(self, chunk: int) -> None:
        if self.chunks[chunk].reductions:
            self.queue.append(_Pending("reductions", chunk, self.chunks[chunk].reductions))

    def gather_first(self) -> float:
        """Gather all parameters before the first task; return the end."""
        self.added_seconds += sum(one.left for one in self.queue)
        self._send(self.added_seconds, self.added_seconds)
        return self.now

    def finished(self, begin: float, more_reductions: float = 0.0) -> float:
        """Return the end of all reductions, some of which begin at a time after the last task."""
        self._send(begin, begin - self.now)
        if more_reductions:
            self.queue.append(_Pending("reductions", 0, more_reductions))
        left = sum(one.left for one in self.queue)
        end = max(self.now, begin) + left
        self._send(end, left)
        self.added_seconds += left
        return end

    def _send(self, until: float, room: float) -> float:
        """Send for some seconds before a time; return the seconds that were used."""
        used, span = 0.0, until - self.now
        begin = self.now
        while self.queue and used < room:
            one = self.queue[0]
            part = min(one.left, room - used)
            one.begin = begin + span * used / room if one.begin is None else one.begin
            used += part
            one.left -= part
            if one.left > 0.0:
                break
            self.ran.append(TrafficTime(one.kind, one.begin, begin + span * used / room))
            self.queue.popleft()
        self.now = max(begin, until)
        return used
