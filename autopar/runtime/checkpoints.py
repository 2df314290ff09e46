"""Checkpoints of a training run: saved while training goes on, the newest complete one found after a restart."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from autopar.errors import AutoparError
from autopar.lowering.collectives.start_group import choose_gloo_interface

__all__ = ["Checkpoints"]

# torch writes this file last, so a folder without it was left by a save that did not end.
COMPLETE = ".metadata"
NAME = "step"

Result = TypeVar("Result")


class Checkpoints:
    """Checkpoints of a training run in one folder, `step100`, `step200` and so on.

    All ranks make it after `parallelize` and call its methods together. A save copies the state and returns; a thread
    writes the copy while training goes on. A run that was killed continues from the newest complete checkpoint, on any
    mesh and under any layout.

    Parameters:
        folder: a folder that all hosts share.
        keep: number of complete checkpoints to keep, and to delete older ones and incomplete ones; None keeps all.

    The state is one of `torch.distributed.checkpoint`: tensors, DTensors, objects with `state_dict` and
    `load_state_dict`, values that can be pickled. Values without shards are those of the first rank that has them.
    """

    def __init__(self, folder: str | Path, keep: int | None = None) -> None:
        if not dist.is_initialized():
            raise AutoparError(
                "checkpoints need a process group: expected one, got none\n"
                "fix: make Checkpoints after parallelize, or after init_process_group"
            )
        if keep is not None and keep < 1:
            raise AutoparError(f"invalid keep={keep}: expected a number of checkpoints from 1 up, or None for all")
        self.folder = Path(folder)
        self.keep = keep
        # The thread that saves sends messages of its own. In a group that a step uses, its messages and those of the
        # step would come in another order on each rank, and both would wait for ever.
        choose_gloo_interface()
        self._group = dist.new_group(backend="gloo")
        self._saving: Future[Any] | None = None
        self._deleted: Future[None] | None = None

    def newest(self) -> Path | None:
        """Return the newest complete checkpoint, chosen by the first rank; None if there is none.

        Checkpoints are ordered by the number of their step. A folder that a killed save left is passed over.
        """
        return self._by_first_rank(lambda: max(self._whole(), key=_step, default=None))

    def load(self, state: dict[str, Any]) -> int | None:
        """Load the newest complete checkpoint into a state, in place; return its step, None if there is none."""
        found = self.newest()
        if found is None:
            return None
        load(state, checkpoint_id=found, process_group=self._group)
        return _step(found)

    def save(self, state: dict[str, Any], step: int) -> None:
        """Begin to save a state; return when it is copied. Waits for the save before it, and raises its error."""
        self.finish()
        folder = self.folder / f"{NAME}{step}"
        # Saved again, it is incomplete until the end. Other ranks write after a message of the first one.
        self._by_first_rank(lambda: (folder / COMPLETE).unlink(missing_ok=True))
        saving = async_save(state, checkpoint_id=folder, planner=_SavePlanner(), process_group=self._group)
        assert isinstance(saving, Future), "the stager of torch copies before it returns"
        self._saving = saving
        if self.keep is not None and dist.get_rank() == 0:
            self._deleted = Future()
            # Runs in the thread of the save: training does not wait for a slow file system.
            saving.add_done_callback(partial(self._delete_old, self._deleted))

    def finish(self) -> None:
        """Wait until the latest save is complete, and raise its error; call it at the end of training."""
        saving, self._saving = self._saving, None
        deleted, self._deleted = self._deleted, None
        if saving is not None:
            saving.result()
        if deleted is not None:
            deleted.result()

    def _delete_old(self, deleted: Future[None], saving: Future[Any]) -> None:
        try:
            if saving.exception() is None:
                self._delete_but_newest()
        except OSError as error:
            deleted.set_exception(error)  # raised where the save is waited for
        else:
            deleted.set_result(None)

    def _delete_but_newest(self) -> None:
        assert self.keep is not None, "else nothing is deleted"
        kept = sorted(self._whole(), key=_step)[-self.keep :]
        for folder in self._folders():
            if folder not in kept and _step(folder) < _step(kept[-1]):
                # First: a run that is killed in between leaves a folder that is passed over.
                (folder / COMPLETE).unlink(missing_ok=True)
                shutil.rmtree(folder, ignore_errors=True)

    def _folders(self) -> list[Path]:
        return [path for path in self.folder.glob(f"{NAME}*") if re.fullmatch(rf"{NAME}\d+", path.name)]

    def _whole(self) -> list[Path]:
        return [path for path in self._folders() if (path / COMPLETE).is_file()]

    def _by_first_rank(self, work: Callable[[], Result]) -> Result:
        """Return the result of the first rank on all ranks; its OSError is an error of all."""
        sent: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                sent = [work()]
            except OSError as error:
                sent = [AutoparError(f"the checkpoints in {self.folder} cannot be used: {error}")]
        dist.broadcast_object_list(sent, src=0, group=self._group)
        if isinstance(sent[0], AutoparError):
            raise sent[0]
        return sent[0]  # type: ignore[no-any-return]


class _SavePlanner(DefaultSavePlanner):
    """Planner of a save that takes values without shards from the first rank that has them.

    torch takes each from any rank, but random states and counters of a loader differ from rank to rank.
    """

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        taken: set[MetadataIndex] = set()
        plans = []
        for plan in all_plans:
            items = [item for item in plan.items if item.type is WriteItemType.SHARD or item.index not in taken]
            taken |= {item.index for item in items if item.type is not WriteItemType.SHARD}
            plans.append(replace(plan, items=items))
        return super().create_global_plan(plans)


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix(NAME))
