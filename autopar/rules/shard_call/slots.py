"""Rows in slots: each group has a fixed number of slots in each sample, which its first rows fill; others are dropped.

All sizes are known before the step, so nothing is read by the host. Rows move by `index_select` in both directions,
without sums, so gradients are deterministic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["put_slots", "take_slots"]


@dataclass(frozen=True)
class _Slots:
    """Where rows and slots find each other, by flat numbers; a place without a partner is not filled."""

    # By slot, as (group, sample, slot): its row, as (sample, row).
    row: Tensor
    has_row: Tensor
    # By row: its slot.
    slot: Tensor
    has_slot: Tensor


def _slots(key: Tensor, groups: int, slots: int) -> _Slots:
    """Return the slots of rows by their keys `[sample, row]`; rows with keys outside of the groups have none."""
    samples, rows = key.shape
    key = torch.where((key >= 0) & (key < groups), key, groups)
    ordered, order = key.sort(dim=1, stable=True)
    # First row of each group in the order, and of the rows without a group.
    every = torch.arange(groups + 1, device=key.device, dtype=key.dtype).expand(samples, -1).contiguous()
    starts = torch.searchsorted(ordered, every)
    places = starts[:, :-1, None] + torch.arange(slots, device=key.device)
    has_row = places < starts[:, 1:, None]
    first_row = torch.arange(samples, device=key.device).view(-1, 1) * rows
    row = order.gather(1, places.clamp(max=rows - 1).flatten(1)) + first_row
    place = order.argsort(dim=1) - starts.gather(1, key)
    has_slot = (key < groups) & (place < slots)
    sample = torch.arange(samples, device=key.device).view(-1, 1)
    slot = torch.where(has_slot, (key * samples + sample) * slots + place, 0)
    by_group = row.view(samples, groups, slots).transpose(0, 1)
    return _Slots(by_group.flatten(), has_row.transpose(0, 1).flatten(), slot.flatten(), has_slot.flatten())


class _MoveRows(torch.autograd.Function):
    """Rows by number, zero where there is none; the gradient goes the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, row: Tensor, has: Tensor, back: Tensor, has_back: Tensor) -> Tensor:
        ctx.save_for_backward(row, has, back, has_back)
        return x.index_select(0, row).masked_fill(~has.unsqueeze(1), 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        row, has, back, has_back = ctx.saved_tensors
        moved: Tensor = _MoveRows.apply(gradient, back, has_back, row, has)  # type: ignore[no-untyped-call]
        return moved, None, None, None, None


def take_slots(rows: Tensor, key: Tensor, groups: int, slots: int) -> Tensor:
    """Return the rows of each group's slots, `[group, sample, slot, width]`; empty slots are zero."""
    samples, _, width = rows.shape
    found = _slots(key, groups, slots)
    places = found.row, found.has_row, found.slot, found.has_slot
    moved: Tensor = _MoveRows.apply(rows.flatten(0, 1), *places)  # type: ignore[no-untyped-call]
    return moved.view(groups, samples, slots, width)


def put_slots(rows: Tensor, key: Tensor) -> Tensor:
    """Return the rows of slots at their places, `[sample, row, width]`; rows without a slot are zero."""
    groups, samples, slots, width = rows.shape
    found = _slots(key, groups, slots)
    places = found.slot, found.has_slot, found.row, found.has_row
    moved: Tensor = _MoveRows.apply(rows.flatten(0, 2), *places)  # type: ignore[no-untyped-call]
    return moved.view(samples, key.shape[1], width)
