"""Exchange of a few numbers between all ranks of one host, through shared memory.

A Gloo collective wakes threads on every rank. If ranks share cores, that takes longer than a layer of a small model.
Here a rank writes its numbers and continues; other ranks read them when they need them.

Exchanges are numbered alike on all ranks. A row of the memory stores the numbers of one rank in one exchange, and is
reused after all ranks have read it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from autopar.errors import AutoparError
from autopar.lowering.hoisted_sums import ROOM

__all__ = ["SENT", "SharedExchange", "SharedMemory"]

# Number of exchanges in the memory: rows are reused in a ring of this length.
EXCHANGES = 8
# Number of exchanges that a rank may leave unread. A rank that read later would let the others wait for each other at
# every `send`, since a row is reused only when all have read it.
UNREAD = EXCHANGES // 2
# Numbers that a rank sends in an exchange: the one to compare, and further ones.
SENT = ROOM + 1
# Numbers in a row: the number of the exchange, the numbers sent, a checksum.
WIDTH = SENT + 2
# Seconds of sleep between two polls, at first and at most: the other ranks may need the core.
REST_SECONDS = 5e-5
LONGEST_REST_SECONDS = 1e-3
# Seconds between two checks that the processes of late ranks still run.
ALIVE_SECONDS = 0.2


class SharedExchange:
    """Numbers of all ranks in one exchange, read at first use."""

    def __init__(self, channel: SharedMemory, number: int) -> None:
        self._channel = channel
        self._number = number
        self._rows: list[list[int]] | None = None

    def rows(self) -> list[list[int]]:
        """Return a row for each rank; wait until all are written."""
        if self._rows is None:
            self._rows = self._channel._read(self._number)
        return self._rows


class SharedMemory:
    """Shared memory of the ranks of one module; either every rank has one or none."""

    def __init__(self, file: Any, me: int, ranks: int, limit_seconds: float) -> None:
        # Open until the process ends: its lock shows that the process runs.
        self._file = file
        self._me = me
        self._ranks = ranks
        self._limit_seconds = limit_seconds
        memory = memoryview(mmap.mmap(file.fileno(), _bytes(ranks))).cast("q")
        self._read_up_to = memory[:ranks]
        # By exchange, then rank.
        self._rows = [
            [memory[begin : begin + WIDTH] for begin in range(ranks + first * WIDTH, len(memory), EXCHANGES * WIDTH)]
            for first in range(EXCHANGES)
        ]
        self._number = 0
        self._unread: dict[int, SharedExchange] = {}

    @staticmethod
    def create(ranks: int) -> tuple[str, Any] | None:
        """Create memory for these ranks; return its path in /proc and its file, or None on failure.

        It has no name in a folder, so nothing is left when the processes have ended, also after a crash.
        """
        name = f"autopar-{secrets.token_hex(8)}"
        try:
            file = open(os.memfd_create(name), "r+b")  # noqa: SIM115
            # Written, not truncated to size: a read of a hole ends the process if memory is short (SIGBUS).
            file.write(bytes(_bytes(ranks)))
            file.flush()
        except OSError:
            return None
        return f"/proc/{os.getpid()}/fd/{file.fileno()}:{name}", file

    @staticmethod
    def open(place: str | None, me: int, ranks: int, limit_seconds: float, file: Any = None) -> SharedMemory | None:
        """Open the memory at a place, or return None; its creator passes its own `file`."""
        if place is None:
            return None
        path, _, name = place.rpartition(":")
        try:
            if file is None:
                # On another host the same path may be another file; the random name tells them apart.
                if name not in os.readlink(path):
                    return None
                file = open(path, "r+b")  # noqa: SIM115
            # Each rank locks the byte of its own number.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, me)
            return SharedMemory(file, me, ranks, limit_seconds)
        except OSError:
            return None

    def send(self, numbers: Sequence[int]) -> SharedExchange:
        """Write at most `SENT` signed 64 bit numbers; all ranks call this equally often."""
        # Own exchanges that were never read would block the ring for all ranks.
        for exchange in [each for number, each in self._unread.items() if number <= self._number + 1 - UNREAD]:
            exchange.rows()
        self._number += 1
        number = self._number
        self._wait(self._read_up_to.tolist, number - EXCHANGES)
        sent = [number, *numbers, *(0,) * (SENT - len(numbers))]
        # The checksum shows a reader that a row is written in part.
        self._rows[number % EXCHANGES][self._me][:] = array("q", (*sent, _check(sent)))
        self._unread[number] = exchange = SharedExchange(self, number)
        return exchange

    def _read(self, number: int) -> list[list[int]]:
        rows = self._rows[number % EXCHANGES]
        found = [row.tolist() for row in rows]
        while not all(row[0] == number and row[-1] == _check(row[:-1]) for row in found):
            self._wait(lambda: [row[0] for row in rows], number)
            found = [row.tolist() for row in rows]
        self._unread.pop(number, None)
        self._read_up_to[self._me] = min(self._unread, default=self._number + 1) - 1
        return [row[1:-1] for row in found]

    def _wait(self, reached: Callable[[], list[int]], number: int) -> None:
        """Wait until all ranks have reached a number."""
        if min(reached()) >= number:
            return
        begun, rest = time.monotonic(), REST_SECONDS
        alive = begun + ALIVE_SECONDS
        while min(reached()) < number:
            time.sleep(rest)
            rest = min(1.2 * rest, LONGEST_REST_SECONDS)
            now = time.monotonic()
            if now > alive:
                late = [rank for rank, there in enumerate(reached()) if there < number]
                self._look_after(late, now - begun)
                alive = now + ALIVE_SECONDS

    def _look_after(self, late: Sequence[int], seconds: float) -> None:
        for rank in late:
            if self._is_gone(rank):
                raise AutoparError(
                    f"the process of rank {rank} of the mesh has ended, but this rank waits for it\n"
                    "fix: read the error message of that rank"
                )
        if seconds > self._limit_seconds:
            raise AutoparError(
                f"waited {seconds:.0f} seconds, the limit of the process group, for rank {late[0]} of the mesh to make "
                "the same call\nfix: call the module on every rank; init_process_group(timeout=...) sets a longer limit"
            )

    def _is_gone(self, rank: int) -> bool:
        """Return whether a rank's process has ended."""
        # The kernel releases the lock of a process at its end, also after a crash.
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return False
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)
        return True


def _bytes(ranks: int) -> int:
    return 8 * (ranks + EXCHANGES * ranks * WIDTH)


def _check(numbers: Sequence[int]) -> int:
    """Return a hash of 63 bits, not zero for a row of zeros."""
    return hash((WIDTH, *numbers)) >> 1
