"""A few numbers from every rank to all others of one host, through memory that they share.

A collective of Gloo wakes threads on every rank; where ranks share cores, that takes longer than a layer of a small
model. Here a rank writes its numbers and goes on, and whoever wants them finds them there.

Exchanges are counted: the third of one rank is the third of all. A row of the memory holds what one rank says in one
exchange, and is written again when all ranks have read it.
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
from autopar.lowering.passes.hoist_small_sums import ROOM

__all__ = ["SAID", "SharedExchange", "SharedMemory"]

# So many may be unread.
EXCHANGES = 8
# Numbers that a rank says in an exchange: what is compared, and what goes along.
SAID = ROOM + 1
# Numbers in a row: which exchange, what is said, a check.
WIDTH = SAID + 2
# Seconds that a waiting rank sleeps before it looks again: the others may need its core.
REST_SECONDS = 5e-5
LONGEST_REST_SECONDS = 1e-3
# How often a rank that waits looks whether the others are still there.
ALIVE_SECONDS = 0.2


class SharedExchange:
    """Return the values of all ranks, as soon as they are there."""

    def __init__(self, channel: SharedMemory, number: int) -> None:
        self._channel = channel
        self._number = number
        self._rows: list[list[int]] | None = None

    def rows(self) -> list[list[int]]:
        """A row for each rank; waits for the last of them."""
        if self._rows is None:
            self._rows = self._channel._read(self._number)
        return self._rows


class SharedMemory:
    """One per module and process; every rank of the module has one, or none has."""

    def __init__(self, file: Any, me: int, ranks: int, limit_seconds: float) -> None:
        self._file = file  # open while we live: its lock says so
        self._me = me
        self._ranks = ranks
        self._limit_seconds = limit_seconds
        memory = memoryview(mmap.mmap(file.fileno(), _bytes(ranks))).cast("q")
        self._read_up_to = memory[:ranks]
        self._rows = [
            [memory[begin : begin + WIDTH] for begin in range(ranks + first * WIDTH, len(memory), EXCHANGES * WIDTH)]
            for first in range(EXCHANGES)
        ]
        """Indexed by exchange and rank."""
        self._number = 0
        self._unread: dict[int, SharedExchange] = {}

    @staticmethod
    def create(ranks: int) -> tuple[str, Any] | None:
        """Memory for so many ranks: where processes of this host find it, and its file; None where there is none.

        It has no name in any folder, so that nothing is left of it when the processes have ended, however they end.
        """
        name = f"autopar-{secrets.token_hex(8)}"
        try:
            file = open(os.memfd_create(name), "r+b")  # noqa: SIM115
            file.write(bytes(_bytes(ranks)))  # not a file with holes: without memory for them, reading is deadly
            file.flush()
        except OSError:
            return None
        return f"/proc/{os.getpid()}/fd/{file.fileno()}:{name}", file

    @staticmethod
    def open(place: str | None, me: int, ranks: int, limit_seconds: float, file: Any = None) -> SharedMemory | None:
        """The channel at a place, if this process sees it; `file` is that of whoever has created it."""
        if place is None:
            return None
        path, _, name = place.rpartition(":")
        try:
            if file is None:
                if name not in os.readlink(path):  # on another host it is another file
                    return None
                file = open(path, "r+b")  # noqa: SIM115
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, me)
            return SharedMemory(file, me, ranks, limit_seconds)
        except OSError:
            return None

    def say(self, numbers: Sequence[int]) -> SharedExchange:
        """Say at most `SAID` numbers, each of 64 bits with a sign; all ranks do."""
        for exchange in [each for number, each in self._unread.items() if number <= self._number + 1 - EXCHANGES]:
            exchange.rows()
        self._number += 1
        number = self._number
        self._wait(self._read_up_to.tolist, number - EXCHANGES)
        said = [number, *numbers, *(0,) * (SAID - len(numbers))]
        # The check comes with the numbers: whoever sees a part of a row sees that it is one.
        self._rows[number % EXCHANGES][self._me][:] = array("q", (*said, _check(said)))
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
        """Until all ranks have reached a number."""
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
                    f"rank {rank} of the mesh has ended, and this rank waits for it\nfix: see what that rank said"
                )
        if seconds > self._limit_seconds:
            raise AutoparError(
                f"waited {seconds:.0f} seconds, the limit of the process group, for rank {late[0]} of the mesh to make "
                "the same call\nfix: call the module on every rank; a longer limit is init_process_group(timeout=...)"
            )

    def _is_gone(self, rank: int) -> bool:
        """A process keeps its lock until it ends, however it ends."""
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
