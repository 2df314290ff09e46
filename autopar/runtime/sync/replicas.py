"""`module.replicas`: the replicas of a parallel module that drift, and the meetings that torch's optimizer hooks call.

The training loop stays as it is. Each `optimizer.step()` of an optimizer with parameters of the module counts; a step
has ended when all trained parameters have been stepped, by one optimizer or by several. A step without a call of the
module since the last one does not count: torch makes one to fill the states of a new optimizer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autopar.errors import AutoparError
from autopar.lowering.collectives.checksum import checksum
from autopar.runtime.sync.mean import MeanMeeting
from autopar.runtime.sync.meeting import Meeting, number
from autopar.runtime.sync.neighbours import NeighbourMeeting
from autopar.runtime.sync.push import PushMeeting
from autopar.runtime.sync.replica_group import ReplicaGroup
from autopar.runtime.sync.server import ServerMeeting
from autopar.runtime.sync.shard_vector import ShardVector
from autopar.runtime.sync.torchft_mean import TorchftMeeting
from autopar.sharding.layout.drift import DriftStatement, print_drift
from autopar.sharding.replicas import Drift

__all__ = ["Replicas"]

MEETINGS: Mapping[str, Callable[[DriftStatement, ShardVector, ReplicaGroup], Meeting]] = {
    "mean": MeanMeeting,
    "ring": NeighbourMeeting,
    "exponential": NeighbourMeeting,
    "server": ServerMeeting,
}
# Numbers that are compared before the first step.
SAME_START = ("number of steps", "number of parameters", "split of parameters", "weights")


class Replicas:
    """Replicas of a module along an axis that drifts, seen from this rank."""

    def __init__(self, drift: Drift, group: ReplicaGroup, parameters: Callable[[], Mapping[str, nn.Parameter]]) -> None:
        self.drift, self.group, self._parameters = drift, group, parameters
        # Steps of the optimizer so far.
        self.steps = 0
        # Rows of the batch of all calls with gradients since the last step.
        self._rows = 0.0
        self._meeting: Meeting | None = None
        self._begun = self._averaged = False
        # Parameters that have been stepped in the current step, and the optimizers that did it.
        self._stepped: set[int] = set()
        self._optimizers: set[int] = set()
        own = weakref.ref(self)
        hooks = [
            register_optimizer_step_pre_hook(lambda optimizer, *_: _call(own, Replicas._before, optimizer)),
            register_optimizer_step_post_hook(lambda optimizer, *_: _call(own, Replicas._after, optimizer)),
        ]
        for hook in hooks:
            weakref.finalize(self, hook.remove)

    @property
    def index(self) -> int:
        """Return the number of this rank's replica."""
        return self.group.index

    @property
    def count(self) -> int:
        """Return the number of replicas."""
        return self.group.count

    @property
    def meeting(self) -> Meeting:
        if self._meeting is None:
            statement, vector = self.drift.statement, ShardVector(self._parameters)
            waits = statement.stale == 0 or statement.meeting == "server"
            kind = MEETINGS[statement.meeting] if waits else PushMeeting
            if self.group.group is None:  # the other replicas are launches of their own
                self._meeting = TorchftMeeting(statement, vector, self.group, self)
            else:
                self._meeting = kind(statement, vector, self.group)
        return self._meeting

    @property
    def weight(self) -> float:
        """Return the share of the batch that this replica trains on: its rows ÷ all rows, at the latest meeting."""
        return self.meeting.weight

    @property
    def sent_bytes(self) -> float:
        """Return the bytes that this rank has sent at meetings."""
        return self.meeting.sent_bytes

    def count_rows(self, rows: int) -> None:
        """Count the rows of a call that gradients are computed for."""
        self._rows += rows

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of a value over all replicas, such as a loss to print; all replicas wait for it.

        Parameters:
            value: a tensor of the same shape in all replicas.

        Returns:
            The mean, each replica with the weight of its share of the batch at the latest meeting.
        """
        if self.group.group is None:
            raise AutoparError(
                "replicas over torchft have no mean of values: some may be gone\nfix: print the loss of each"
            )
        local: Any = value.detach()
        found: Tensor = (local.full_tensor() if isinstance(local, DTensor) else local) * self.weight
        dist.all_reduce(found, group=self.group.group)
        return found

    def average_gradients(self) -> None:
        """Take the mean of the gradients of all replicas now, before they are clipped; for `every 0` alone.

        The optimizer's step would do it otherwise.
        """
        if self.drift.statement.every:
            raise AutoparError(
                f"'{print_drift(self.drift.statement)}' has no meeting about gradients: expected 'every 0'\n"
                "fix: clip the gradients of each replica by themselves, without average_gradients()"
            )
        if self._rows:
            self._begin()
            self.meeting.before_step(self._rows)
            self._averaged = True

    def finish(self) -> None:
        """Complete the meetings under way; call it on all ranks after the last step."""
        self.meeting.finish()

    # -- steps of optimizers -------------------------------------------------------------------------------------------

    def _own(self, optimizer: Optimizer) -> set[int]:
        """Return the trained parameters of the module that an optimizer has, by identity."""
        trained = {id(parameter) for parameter in self._parameters().values() if parameter.requires_grad}
        return trained & {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}

    def _before(self, optimizer: Optimizer) -> None:
        if not self._rows or not self._own(optimizer):
            return
        if id(optimizer) in self._optimizers:
            trained = [name for name, one in self._parameters().items() if one.requires_grad]
            left = [name for name in trained if id(self._parameters()[name]) not in self._stepped]
            raise AutoparError(
                f"no optimizer has {', '.join(left[:3])}{' ...' if len(left) > 3 else ''}: expected a step of all "
                f"{len(trained)} trained parameters before the next one\n"
                "fix: give them to an optimizer, or requires_grad_(False), so that meetings know when a step ends"
            )
        self._begin()
        if self.drift.statement.every == 0 and not self._averaged:
            self.meeting.before_step(self._rows)
            self._averaged = True

    def _after(self, optimizer: Optimizer) -> None:
        own = self._own(optimizer)
        if not self._rows or not own:
            return
        self._stepped |= own
        self._optimizers.add(id(optimizer))
        trained = {id(parameter) for parameter in self._parameters().values() if parameter.requires_grad}
        if not trained <= self._stepped:
            return
        rows, self._rows, self._averaged = self._rows, 0.0, False
        self._stepped.clear()
        self._optimizers.clear()
        self.steps += 1
        self.meeting.after_step(self.steps, rows)

    def _begin(self) -> None:
        """Prepare before the first step; replicas that must start alike are compared."""
        if self._begun:
            return
        self._begun = True
        common = self.meeting.common()
        self.meeting.begin()
        if self.group.group is None:
            return  # a replica that comes back has another start
        start = 0 if common is None else checksum(common)
        vector = self.meeting.vector
        numbers = [self.steps, vector.size, crc32(vector.shardings.encode()), start % 2**62]
        facts = torch.tensor(numbers, device=vector.device)
        rows = self.group.gathered(facts)
        for other, row in enumerate(rows):
            for what, a, b in zip(SAME_START, rows[0], row, strict=True):
                if a != b:
                    raise AutoparError(
                        f"replica 0 and replica {other} start with another {what}: expected the same\n"
                        "fix: build the same model on every rank, or load the same checkpoint on all"
                    )

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def own(self, state: Any) -> dict[str, Any]:
        """Return a state under the name of this replica: what `torch.distributed.checkpoint` saves of each replica.

        Replicas have states of their own between meetings, and an optimizer's state is never the same in two of them.
        """
        return {f"replica{self.index}": state}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the meetings, for `torch.distributed.checkpoint` on all ranks together."""
        meeting, every = self.meeting, self.drift.statement.every
        if meeting.has_equal_replicas and every and self.steps > self.drift.statement.warmup:
            since = (self.steps - self.drift.statement.warmup) % every
            if since:
                raise AutoparError(
                    f"a checkpoint at step {self.steps} would mix replicas that differ: expected a step right after a "
                    f"meeting, got {since} steps after one\n"
                    f"fix: save at step {self.steps - since + every}, or another one after a meeting"
                )
        common, own = meeting.state()
        own |= {"rows": number(self._rows)}
        if not meeting.has_equal_replicas:
            own |= meeting.vector.tensors(meeting.vector.read(0, meeting.vector.size), "weights")
        return {**common, "steps": number(self.steps), **self.own(own)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the state of the meetings; load the model first."""
        own = next(iter(self.own(None)))
        meeting = self.meeting
        meeting.load(state, state[own])
        self.steps, self._rows = int(state["steps"]), float(state[own]["rows"])
        if not meeting.has_equal_replicas:
            meeting.vector.write(0, meeting.vector.size, meeting.vector.vector(state[own], "weights"))
            meeting.loaded()


def _call(reference: weakref.ref[Replicas], method: Callable[[Replicas, Optimizer], None], optimizer: Any) -> None:
    replicas = reference()
    if replicas is not None:
        method(replicas, optimizer)
