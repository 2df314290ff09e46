"""The keys of a parallel module's random numbers: one for each call, the same on all ranks.

A key is drawn from the default generator of the first rank, as a model draws its numbers from it. So `manual_seed`
makes a run repeat itself, the generator's state is all that a checkpoint has to save, and `torch.utils.checkpoint`,
which puts the generator back before it calls the module again, gets the same numbers again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import AutoparError
from autopar.lowering.collectives.checksum import checksum
from autopar.lowering.collectives.process_groups import keep_gloo_local
from autopar.lowering.passes.random_ops import DrawnOp
from autopar.runtime.ranks.agreement import Agreement

__all__ = ["RandomKeys", "kept_generators"]

# Calls whose backward may be outstanding: more than any pipeline has in flight.
REMEMBERED = 4096


class RandomKeys:
    """Source of the random numbers of a module's calls."""

    def __init__(self, agreement: Agreement, device: torch.device) -> None:
        self.agreement = agreement
        self.device = device
        self.is_exact = False
        self._group: Any = agreement.group
        self._recent: dict[int, tuple[DrawnOp, ...]] = {}
        self._own: int | None = None
        self._agreed: int | None = None

    def offered(self) -> tuple[int, ...]:
        """Draw this rank's number for the next key, to be sent along with a comparison of the call."""
        if self.is_exact:
            return ()
        self._own = int(torch.randint(2**62, ()))
        return (self._own,)

    def agree(self, number: int) -> None:
        """Take the number that the first rank has sent along."""
        self._agreed = number

    def key(self, ops: tuple[DrawnOp, ...]) -> Tensor:
        """The key of a call that runs these drawing ops: its number, and whether numbers are drawn exactly."""
        own, self._own = self._own, None
        agreed, self._agreed = self._agreed, None
        if self.is_exact:
            self._check_exact(ops)
            return torch.tensor([0, 1])
        if agreed is None:
            key = torch.tensor([own if own is not None else int(torch.randint(2**62, ())), 0])
            dist.broadcast(key, src=self.agreement.ranks[0], group=self._host_group())
        else:
            key = torch.tensor([agreed, 0])
        self._check_again(int(key[0]), ops)
        return key

    def _host_group(self) -> Any:
        """The ranks as a group that sends from the memory of the host, so that no device is waited for."""
        if self.agreement.device.type != "cpu" and self._group is self.agreement.group:
            keep_gloo_local()
            self._group = dist.new_group(self.agreement.ranks, backend="gloo", use_local_synchronization=True)
        return self._group

    def _check_again(self, number: int, ops: tuple[DrawnOp, ...]) -> None:
        """In a backward the call is one that is done again: its ops must be split as they were, to draw the same."""
        if torch._C._current_graph_task_id() == -1:
            self._recent.pop(number, None)
            self._recent[number] = ops
            if len(self._recent) > REMEMBERED:
                del self._recent[next(iter(self._recent))]
            return
        before = self._recent.get(number)
        if before is None:
            raise AutoparError(
                "the module draws random numbers and is called in a backward, but not with the state that the random "
                "generator had in an earlier call: other numbers would be drawn than in the forward\n"
                "fix: checkpoint(..., preserve_rng_state=True), which is the default; where the forward ran under "
                "exact_randomness(), run the backward under it as well"
            )
        if before != ops:
            first, second = next(pair for pair in zip_longest(before, ops) if pair[0] != pair[1])
            raise AutoparError(
                f"the module is called again in a backward and would draw other numbers than in the forward: "
                f"{_said(first)} then, {_said(second)} now\n"
                "fix: checkpoint(..., use_reentrant=False), which calls it in the same way both times"
            )

    # -- exact mode ---------------------------------------------------------------------------------------------------

    @contextmanager
    def exact(self) -> Iterator[None]:
        """Draw all numbers as one process does, from the default generator, which must be the same on all ranks."""
        states = {"state of the random generator": str(checksum(torch.get_rng_state()))}
        if self.device.type != "cpu":
            state = torch.get_device_module(self.device.type).get_rng_state(self.device)
            states["state of the random generator of the device"] = str(checksum(state))
        self.agreement.same(states, "torch.manual_seed(n), with one n for all ranks, before exact_randomness()")
        before, self.is_exact = self.is_exact, True
        try:
            yield
        finally:
            self.is_exact = before

    def _check_exact(self, ops: tuple[DrawnOp, ...]) -> None:
        for op in ops:
            if not op.exact:
                raise AutoparError(
                    f"exact_randomness(): how many numbers {op.name} ({op.op}) draws depends on all its values, and "
                    f"the layout splits it: {op.choice}\nfix: a layout that leaves it whole, or compare without it"
                )


def _said(op: DrawnOp | None) -> str:
    return "no such op" if op is None else f"{op.name} split as [{op.choice}]"


@contextmanager
def kept_generators(device: torch.device) -> Iterator[None]:
    """Put the default generators back afterwards: planning must not change what the model draws."""
    if device.type == "cpu":
        with torch.random.fork_rng(devices=[]):
            yield
    else:
        with torch.random.fork_rng(devices=[device.index], device_type=device.type):
            yield
