"""Keys that each row of attention sees where a mask keeps documents apart, and the calls of a kernel for them.

A mask of packed documents is a conjunction of facts about a row and a key: both have the same number, the number of the
key is not above that of the row, the key is no padding, the key stands before the row. In most batches each row then
sees one range of keys. The table has the ends of this range, and the numbers themselves: where a row would see several
ranges, its scores are masked by them in blocks. So whatever the numbers are, the result is that of the mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.rules.shard_call.attention import BLOCK_ROWS
from autopar.rules.shard_call.attention_kernels import KeyRange
from autopar.rules.shard_call.folded import RowStretch

__all__ = [
    "ENDS",
    "NEAR",
    "ORDER",
    "SAME",
    "SEEN",
    "DocumentMask",
    "RangeCall",
    "calls_of_one",
    "document_table",
    "range_calls",
    "several_ranges",
]

# Facts: row and key have the same number; that of the key is at most that of the row; that of the key is not 0; that of
# the key is less than 5 below that of the row, as in `near5`.
SAME, ORDER, SEEN, NEAR = "same", "order", "seen", "near"
# Columns of the table: first key, end of the keys; the numbers follow.
ENDS = 2
# In place of the ends, in a sample whose rows may see several ranges.
SEVERAL = -1


@dataclass(frozen=True)
class DocumentMask:
    """Mask of attention as a conjunction: of a fact for each number of a position, of an order, of a window."""

    kinds: tuple[str, ...]
    # Rows see no later keys.
    causal: bool
    # Rows see so many keys up to their own; 0 for all.
    window: int = 0

    def visible(self, rows: Tensor, keys: Tensor, first: int) -> Tensor:
        """Return the keys that rows see, by the numbers of both; `first` is the position of the first row."""
        place = torch.arange(keys.shape[0], device=keys.device)
        own = torch.arange(first, first + rows.shape[0], device=keys.device)[:, None]
        found = torch.ones(rows.shape[0], keys.shape[0], dtype=torch.bool, device=keys.device)
        for number, kind in enumerate(self.kinds):
            of_rows, of_keys = rows[:, number, None], keys[:, number]
            if kind == SAME:
                found &= of_rows == of_keys
            elif kind == ORDER:
                found &= of_keys <= of_rows
            elif kind == SEEN:
                found &= of_keys != 0
            else:
                found &= of_keys > of_rows - _reach(kind)
        if self.causal:
            found &= place <= own
        if self.window:
            found &= place > own - self.window
        return found


# -- the table ---------------------------------------------------------------------------------------------------------


def document_table(numbers: Tensor, mask: DocumentMask) -> Tensor:
    """Return the table `batch positions columns` from the numbers `batch facts positions` of each position."""
    by_kind = {kind: [numbers[:, i] for i, one in enumerate(mask.kinds) if one == kind] for kind in mask.kinds}
    batch, _, count = numbers.shape
    place = torch.arange(count, device=numbers.device).expand(batch, count)
    begins = torch.zeros_like(place, dtype=torch.bool)
    begins[:, :1] = True
    for one in by_kind.get(SAME, []):
        begins[:, 1:] |= one[:, 1:] != one[:, :-1]
    document = begins.cumsum(1) - 1
    is_range = _are_apart(by_kind.get(SAME, []), document)
    for one in by_kind.get(ORDER, []):
        earlier, later = one[:, :-1], one[:, 1:]
        # With equal numbers two rows see each other, unless they are in order otherwise.
        ascends = earlier <= later if mask.causal else earlier < later
        is_range &= (ascends | begins[:, 1:]).all(1)
    window = mask.window
    for number, kind in enumerate(mask.kinds):
        if kind.startswith(NEAR):
            # Positions: then their window is one of rows and keys.
            one = numbers[:, number]
            is_range &= ((one[:, 1:] - one[:, :-1] == 1) | begins[:, 1:]).all(1)
            window = min(window or count, _reach(kind))
    shown = torch.ones_like(begins)
    for one in by_kind.get(SEEN, []):
        shown &= one != 0
    first = _of_documents(torch.where(shown, place, count), document, "amin", count)
    stop = _of_documents(torch.where(shown, place + 1, 0), document, "amax", 0)
    shown_count = _of_documents(shown.long(), document, "sum", 0)
    is_range &= ((shown_count == stop - first) | (shown_count == 0)).all(1)
    if mask.causal or ORDER in by_kind:
        stop = torch.minimum(stop, place + 1)
    if window:
        first = torch.maximum(first, place + 1 - window)
    sees = first < stop
    ends = torch.stack([torch.where(sees, first, 0), torch.where(sees, stop, 0)], -1)
    ends = torch.where(is_range[:, None, None], ends, SEVERAL)
    return torch.cat([ends, numbers.mT], -1)


def _reach(kind: str) -> int:
    return int(kind.removeprefix(NEAR))


def _are_apart(same: list[Tensor], document: Tensor) -> Tensor:
    """Return for each sample whether no two of its documents have the same numbers."""
    count = document.shape[1]
    joined = torch.zeros_like(document)
    for one in same:
        joined = _ranks(joined * count + _ranks(one))
    return joined.amax(1) == document[:, -1]


def _ranks(numbers: Tensor) -> Tensor:
    """Return how many smaller numbers a row has, equal ones counted once."""
    ordered, origin = numbers.sort(1)
    steps = torch.zeros_like(origin)
    steps[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    return torch.zeros_like(origin).scatter(1, origin, steps.cumsum(1))


def _of_documents(numbers: Tensor, document: Tensor, reduce: str, least: int) -> Tensor:
    """Return at each position the minimum, maximum or sum over its document."""
    found = torch.full_like(numbers, least).scatter_reduce(1, document, numbers, reduce)
    return found.gather(1, document)


# -- calls -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RangeCall:
    """Rows of some samples, and the parts of the keys that they see."""

    sample: int
    samples: int
    row: int
    rows: int
    parts: tuple[KeyRange, ...]
    # Keys of each row, where runs share a call: a mask hides the others.
    ends: Tensor | None = None


# Runs of fewer rows, on as few keys, share calls of so many rows with a mask. On a CPU core documents of 4 and of 8
# tokens take half of the time so; those of 16 tokens take no less.
SHORT_ROWS = 16
SHARED_ROWS = 64

# How the first key and the end of the keys move from one row to the next.
_FULL, _CAUSAL, _WINDOW, _OTHER = range(4)


@dataclass(frozen=True)
class _RowRun:
    """Rows whose keys move alike: the first row, their number, and the keys of the first one."""

    row: int
    rows: int
    first: int
    stop: int
    motion: int

    @property
    def end(self) -> int:
        """Return the end of the keys of all rows."""
        return self.stop + (0 if self.motion == _FULL else self.rows - 1)

    @property
    def is_short(self) -> bool:
        return self.rows < SHORT_ROWS and self.end - self.first < SHORT_ROWS

    def part(self, begin: int, rows: int) -> _RowRun:
        first = self.first + (begin if self.motion == _WINDOW else 0)
        stop = self.stop + (0 if self.motion == _FULL else begin)
        return _RowRun(self.row + begin, rows, first, stop, self.motion)

    def keys(self, kernel: str) -> tuple[KeyRange, ...]:
        """Return the keys as the kernel takes them."""
        every = ((self.first, self.end - self.first, False),)
        if self.motion == _WINDOW:
            return (KeyRange(every, causal=True, window=self.stop - self.first),)
        if self.motion == _FULL:
            return (KeyRange(every),)
        before = self.stop - 1 - self.first
        if kernel != "cpu" or not before:
            return (KeyRange(every, causal=True),)
        # The CPU's causal form begins with the first key.
        own = (self.first + before, self.rows, False)
        return KeyRange(((self.first, before, False),)), KeyRange((own,), causal=True)


def calls_of_one(
    samples: int, stretches: tuple[RowStretch, ...], kernel: str, mask: DocumentMask
) -> Iterator[RangeCall]:
    """Yield the calls of a kernel if each sample were one document."""
    for one in stretches:
        is_causal = mask.causal or ORDER in mask.kinds
        stop = one.begin + 1 if is_causal else one.begin + one.rows
        run = _RowRun(one.row, one.rows, 0, stop, _CAUSAL if is_causal else _FULL)
        yield RangeCall(0, samples, run.row, run.rows, run.keys(kernel))


def range_calls(table: Tensor, stretches: tuple[RowStretch, ...], kernel: str) -> Iterator[RangeCall]:
    """Yield the calls of a kernel for samples whose rows see one range of keys; `table` is on the host."""
    ends = table[..., :ENDS]
    samples = ends.shape[0]
    # Samples with the same documents share their calls.
    alike = bool((ends == ends[:1]).all())
    for sample in range(1 if alike else samples):
        for stretch in stretches:
            of_stretch = ends[sample, stretch.begin : stretch.begin + stretch.rows]
            for runs in _shared(_runs(of_stretch, stretch)):
                group = sample, samples if alike else 1
                if len(runs) > 1:
                    yield _call_of_several(runs, group, of_stretch[runs[0].row - stretch.row :])
                    continue
                (run,) = runs
                # A kernel takes a run at once; written out, and beside a mask for a window, it is cut in blocks.
                block = run.rows
                if kernel == "written":
                    block = BLOCK_ROWS
                elif run.motion == _WINDOW and kernel == "cpu":
                    block = max(run.stop - run.first, SHARED_ROWS)
                for begin in range(0, run.rows, block):
                    part = run.part(begin, min(block, run.rows - begin))
                    yield RangeCall(*group, part.row, part.rows, part.keys(kernel))


def _shared(runs: Iterable[_RowRun]) -> Iterator[list[_RowRun]]:
    """Yield runs by themselves, and short ones that follow on each other together."""
    held: list[_RowRun] = []
    for run in runs:
        first, end = (min(one.first for one in [*held, run]), max(one.end for one in [*held, run]))
        follows = not held or held[-1].row + held[-1].rows == run.row
        fits = run.row + run.rows - (held or [run])[0].row <= SHARED_ROWS and end - first <= SHARED_ROWS + SHORT_ROWS
        if held and not (run.is_short and follows and fits):
            yield held
            held = []
        held.append(run)
        if not run.is_short:
            yield held
            held = []
    if held:
        yield held


def _call_of_several(runs: list[_RowRun], group: tuple[int, int], ends: Tensor) -> RangeCall:
    first, end = min(run.first for run in runs), max(run.end for run in runs)
    rows = sum(run.rows for run in runs)
    part = KeyRange(((first, end - first, False),))
    return RangeCall(*group, runs[0].row, rows, (part,), ends[:rows] - first)


def several_ranges(table: Tensor) -> tuple[int, ...]:
    """Return the samples whose rows may see several ranges of keys; `table` is on the host."""
    return tuple((table[:, 0, 0] == SEVERAL).nonzero().flatten().tolist())


def _runs(own: Tensor, stretch: RowStretch) -> Iterator[_RowRun]:
    """Yield the runs of rows that see keys, from the ends of the keys of each row of a stretch."""
    if int(own[0, 0]) == SEVERAL:
        return
    moves = own[1:] - own[:-1]
    up_to_row = own[1:, 1] == torch.arange(stretch.begin + 2, stretch.begin + stretch.rows + 1)
    motions = torch.full((stretch.rows - 1,), _OTHER)
    motions[(moves == 0).all(1)] = _FULL
    motions[(moves[:, 0] == 0) & (moves[:, 1] == 1) & up_to_row] = _CAUSAL
    motions[(moves == 1).all(1) & up_to_row] = _WINDOW
    # Places where the motion changes, and each one that begins a row of its own.
    changes = torch.ones(len(motions), dtype=torch.bool)
    changes[1:] = (motions[1:] != motions[:-1]) | (motions[1:] == _OTHER)
    begins: list[int] = changes.nonzero().flatten().tolist()
    found: list[tuple[int, int, int]] = []
    row = 0
    for begin, stop, motion in zip(begins, [*begins[1:], len(motions)], motions[begins].tolist(), strict=True):
        # A run has one row more than moves; the first one may belong to the run before.
        last = begin if motion == _OTHER else stop
        if row <= last:
            found.append((row, last + 1 - row, motion if row < last else _FULL))
            row = last + 1
    if row < stretch.rows:
        found.append((row, 1, _FULL))
    keys = own[[row for row, _, _ in found]].tolist()
    for (row, rows, motion), (first, stop) in zip(found, keys, strict=True):
        if first < stop:
            yield _RowRun(stretch.row + row, rows, first, stop, motion)
