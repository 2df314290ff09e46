"""Random keys of a parallel module: one for each call, equal on all ranks.

A key is drawn from the default generator of the first rank. So `manual_seed` makes a run reproducible, and a
checkpoint saves the generator's state alone. `torch.utils.checkpoint` restores the generator before it calls the
module again, which then draws the same numbers.
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
from autopar.lowering.collectives.start_group import choose_gloo_interface
from autopar.lowering.passes.random_ops import DrawnOp
from autopar.runtime.agreement import Agreement

__all__ = ["RandomKeys", "kept_generators"]

# Number of calls whose backward may be outstanding: more than any pipeline has in flight.
REMEMBERED = 4096
# 2**62 divided by the golden ratio: multiples of it lie far apart.
FRACTION = 0x278DDE6E5FD29E17


class RandomKeys:
    """Keys of the random numbers of a module's calls, and the ops that drew from the recent ones."""

    def __init__(self, agreement: Agreement, device: torch.device, replica: int = 0) -> None:
        self.agreement = agreement
        # Replicas that drift draw other numbers each, also if their generators have one state.
        self._replica = replica * FRACTION % 2**62
        self.device = device
        self.is_exact = False
        self._group: Any = agreement.group
        # By key, oldest first.
        self._recent: dict[int, tuple[DrawnOp, ...]] = {}
        # Numbers for the next key: drawn on this rank, and received from the first rank.
        self._own: int | None = None
        self._agreed: int | None = None

    def offered(self) -> tuple[int, ...]:
        """Draw this rank's number for the next key; the comparison of the call sends it."""
        if self.is_exact:
            return ()
        # Every rank draws, although the first rank's number counts: their generators stay in the same state.
        self._own = int(torch.randint(2**62, ()))
        return (self._own,)

    def agree(self, number: int) -> None:
        """Store the number of the first rank as the next key."""
        self._agreed = number

    def key(self, ops: tuple[DrawnOp, ...]) -> Tensor:
        """Return the key of a call: a number, then 1 if numbers are drawn exactly."""
        own, self._own = self._own, None
        agreed, self._agreed = self._agreed, None
        if self.is_exact:
            for op in ops:
                if not op.exact:
                    raise AutoparError(
                        f"exact_randomness() needs {op.name} ({op.op}) whole, because its values decide the count of "
                        f"random numbers: expected no split, got {op.choice}\n"
                        "fix: use a layout that leaves the op whole, or compare without exact_randomness()"
                    )
            return torch.tensor([0, 1])
        if agreed is None:
            key = torch.tensor([own if own is not None else int(torch.randint(2**62, ())), 0])
            if self.agreement.size > 1:
                dist.broadcast(key, src=self.agreement.ranks[0], group=self._host_group())
        else:
            key = torch.tensor([agreed, 0])
        key[0] = (int(key[0]) + self._replica) % 2**62
        self._check_again(int(key[0]), ops)
        return key

    def _host_group(self) -> Any:
        """Return a Gloo group of the ranks, whose broadcast does not make a device wait."""
        # Made at first use: calls that are compared send their key with the comparison.
        if self.agreement.device.type != "cpu" and self._group is self.agreement.group:
            choose_gloo_interface()
            self._group = dist.new_group(self.agreement.ranks, backend="gloo", use_local_synchronization=True)
        return self._group

    def _check_again(self, number: int, ops: tuple[DrawnOp, ...]) -> None:
        """Raise if a recomputed call, one in a backward, would draw other numbers."""
        # -1 outside of a backward.
        if torch._C._current_graph_task_id() == -1:
            # Removed first, so that the key moves to the end of the order.
            self._recent.pop(number, None)
            self._recent[number] = ops
            if len(self._recent) > REMEMBERED:
                del self._recent[next(iter(self._recent))]
            return
        before = self._recent.get(number)
        if before is None:
            raise AutoparError(
                "wrong state of the random generator in a recompute: expected that of an earlier call, got a new one, "
                "which would draw other numbers than the forward\n"
                "fix: use checkpoint(..., preserve_rng_state=True), the default; if the forward ran under "
                "exact_randomness(), run the backward under it too"
            )
        if before != ops:
            first, second = next(pair for pair in zip_longest(before, ops) if pair[0] != pair[1])
            raise AutoparError(
                f"a recompute would draw other random numbers than the forward: "
                f"expected {_outline(first)}, got {_outline(second)}\n"
                "fix: use checkpoint(..., use_reentrant=False), which calls the module in the same way both times"
            )

    # -- exact mode ---------------------------------------------------------------------------------------------------

    @contextmanager
    def exact(self) -> Iterator[None]:
        """Draw numbers as one process does; all ranks need the same generator state."""
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


def _outline(op: DrawnOp | None) -> str:
    return "no such op" if op is None else f"{op.name} split as [{op.choice}]"


@contextmanager
def kept_generators(device: torch.device) -> Iterator[None]:
    """Restore the default generators on exit, so planning leaves the model's numbers."""
    if device.type == "cpu":
        with torch.random.fork_rng(devices=[]):
            yield
    else:
        with torch.random.fork_rng(devices=[device.index], device_type=device.type):
            yield
