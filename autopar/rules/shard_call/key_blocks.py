"""Calls of a kernel for the rows of one shard of a sequence and the keys of another.

A shard has stretches of the sequence: one of the plain order, one for each piece of a fold. Rows see all keys that
stand before them, those up to their own position within a stretch that both shards have, and no later ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from autopar.rules.shard_call.attention_kernels import KeyRange, StoredRange

__all__ = ["BlockCall", "HopWork", "Stretch", "hop_works", "shard_stretches", "visible"]


@dataclass(frozen=True)
class Stretch:
    """Neighbours in the sequence: the first position, their number, their place in the shard, whether reversed."""

    begin: int
    count: int
    at: int
    flips: bool = False

    @property
    def stop(self) -> int:
        return self.begin + self.count

    def stored(self, first: int, stop: int) -> StoredRange:
        """Return where the positions from `first` to `stop` stand in the shard."""
        at = self.at + (self.stop - stop if self.flips else first - self.begin)
        return at, stop - first, self.flips


# Stretches of one shard, in the order in which they are stored.
Stretches = tuple[Stretch, ...]


@dataclass(frozen=True)
class BlockCall:
    """Rows, and keys that all of them see or that the window of each row ends in."""

    rows: tuple[StoredRange, ...]
    keys: KeyRange

    @property
    def row_count(self) -> int:
        return sum(count for _, count, _ in self.rows)

    @property
    def key_count(self) -> int:
        return sum(count for _, count, _ in self.keys.ranges)

    @property
    def pairs(self) -> int:
        """Return the scores that the rows see."""
        rows, keys = self.row_count, self.key_count
        if not self.keys.causal:
            return rows * keys
        found = 0
        for row in range(rows) if self.keys.window else ():
            last = row + keys - rows + self.keys.behind
            found += max(0, min(last, keys - 1) - max(0, last - self.keys.window + 1) + 1)
        return found if self.keys.window else rows * (keys - rows) + rows * (rows + 1) // 2


def shard_stretches(pieces: int, length: int, start: int, count: int) -> Stretches:
    """Return the stretches of a shard with `count` positions from `start` on of each piece; odd pieces are reversed."""
    found = []
    for piece in range(pieces if count else 0):
        flips = piece % 2 == 1
        before = length - start - count if flips else start
        found.append(Stretch(piece * length + before, count, piece * count, flips))
    return tuple(found)


@lru_cache(maxsize=4096)
def visible(rows: Stretches, keys: Stretches, causal: bool, window: int, block: int) -> tuple[BlockCall, ...]:
    """Return the calls for the rows of a shard and the keys of one; `block` is the most rows of a call."""
    total = sum(one.count for one in rows)
    every = _joined((one.at, one.count, False) for one in keys)
    if not total or not every:
        return ()
    if not causal:
        return tuple(
            BlockCall(((first, min(block, total - first), False),), KeyRange(every)) for first in range(0, total, block)
        )
    if rows == keys and not window and total <= block:
        # Both ascend, and the order is all that counts.
        own = tuple(one.stored(one.begin, one.stop) for one in sorted(rows, key=lambda one: one.begin))
        return (BlockCall(own, KeyRange(own, causal=True)),)
    parts = list(_segments(rows, keys, block))
    if window:
        return tuple(call for part in parts for key in keys for call in _in_window(*part, key, window))
    return _with_rows_joined([call for part in parts for call in _up_to_rows(*part, keys)], block)


def _segments(rows: Stretches, keys: Stretches, block: int) -> Iterator[tuple[Stretch, int, int]]:
    """Yield parts of the rows that stand before, within or behind each stretch of keys."""
    ends = sorted({end for key in keys for end in (key.begin, key.stop)})
    for row in rows:
        cuts = [row.begin, *(end for end in ends if row.begin < end < row.stop), row.stop]
        for first, stop in pairwise(cuts):
            yield from ((row, begin, min(begin + block, stop)) for begin in range(first, stop, block))


def _up_to_rows(row: Stretch, first: int, stop: int, keys: Stretches) -> Iterator[BlockCall]:
    own = (row.stored(first, stop),)
    before = [key.stored(key.begin, min(key.stop, first)) for key in keys if key.begin < min(key.stop, first)]
    if before:
        yield BlockCall(own, KeyRange(_joined((at, count, False) for at, count, _ in before)))
    for key in keys:
        if key.begin <= first and stop <= key.stop:
            yield BlockCall(own, KeyRange((key.stored(first, stop),), causal=True))


def _in_window(row: Stretch, first: int, stop: int, key: Stretch, window: int) -> Iterator[BlockCall]:
    last = min(key.stop, stop)
    begin = max(key.begin, first - window + 1)
    # Rows before the first key, or too far behind the last one, see none.
    first, stop = max(first, begin), min(stop, last + window - 1)
    if begin >= last or first >= stop:
        return
    sees_all = first >= last - 1 and stop - window <= begin
    seen = KeyRange((key.stored(begin, last),))
    if not sees_all:
        seen = KeyRange(seen.ranges, causal=True, window=window, behind=stop - last)
    yield BlockCall((row.stored(first, stop),), seen)


def _joined(ranges: Iterable[StoredRange]) -> tuple[StoredRange, ...]:
    """Return ranges whose order does not matter, as few as possible."""
    found: list[StoredRange] = []
    for at, count, _ in sorted(ranges):
        if found and found[-1][0] + found[-1][1] == at:
            found[-1] = (found[-1][0], found[-1][1] + count, False)
        else:
            found.append((at, count, False))
    return tuple(found)


def _with_rows_joined(calls: Sequence[BlockCall], block: int) -> tuple[BlockCall, ...]:
    """Return the calls with neighbouring rows joined that see the same keys, all of them."""
    by_keys: dict[KeyRange, list[BlockCall]] = {}
    found = []
    for call in calls:
        if call.keys.causal:
            found.append(call)
        else:
            by_keys.setdefault(call.keys, []).append(call)
    for keys, same in by_keys.items():
        ranges = _joined((at, count, False) for call in same for at, count, _ in call.rows)
        for at, count, _ in ranges:
            for first in range(0, count, block):
                found.append(BlockCall(((at + first, min(block, count - first), False),), keys))
    return tuple(found)


@dataclass(frozen=True)
class HopWork:
    """Work of a shard on the keys of one: scores, calls of a kernel, and rows whose results are merged."""

    pairs: int
    calls: int
    rows: int


@lru_cache(maxsize=4096)
def hop_works(rows: Stretches, keys: tuple[Stretches, ...], causal: bool, window: int) -> tuple[HopWork, ...]:
    """Return the work of a shard on the keys of several, one after the other."""
    whole = max(1, sum(one.count for one in rows))
    found = []
    for one in keys:
        calls = visible(rows, one, causal, window, whole)
        found.append(HopWork(sum(call.pairs for call in calls), len(calls), sum(call.row_count for call in calls)))
    return tuple(found)
