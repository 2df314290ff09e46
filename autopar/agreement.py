"""All ranks do the same, or all of them stop: what they were given is compared before anything else is sent.

Every rank says what it has before it relies on what others have. So a mistake on one rank is an error on all, and not
a rank that waits for ever.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autopar.engine import group_over
from autopar.errors import AutoparError

__all__ = ["Agreement", "Pending", "checksum", "digest", "kind_of"]

Result = TypeVar("Result")


@dataclass(frozen=True)
class _Failure:
    error: AutoparError


ROOM = 7
"""For so many numbers there is room in a comparison, so that what a call sends first may go with it."""


@dataclass(frozen=True)
class Pending:
    """A comparison that is under way."""

    own: int
    everyone: Tensor
    work: Any

    def result(self) -> Tensor | None:
        """The numbers that ranks have sent along, a row for each; None unless all are in the same call."""
        self.work.wait()
        if any(other != self.own for other in self.everyone[:, 0].tolist()):
            return None
        return self.everyone[:, 1:]


class Agreement:
    """The ranks of a mesh, which compare what they have."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.size = mesh.size()
        self.group = None
        if self.size > 1:
            self.group = group_over(mesh)
            self.ranks = dist.get_process_group_ranks(self.group)
            self.device = torch.device("cpu" if mesh.device_type == "cpu" else f"{mesh.device_type}")

    @property
    def is_cheap(self) -> bool:
        """Whether a few numbers can be exchanged without making a device wait."""
        return self.size > 1 and self.device.type == "cpu"

    def together(self, work: Callable[[], Result]) -> Result:
        """What `work` gives on this rank; an error on any rank is an error on all."""
        result: Result | None = None
        own: AutoparError | None = None
        try:
            result = work()
        except AutoparError as error:
            own = error
        texts = self._gather(None if own is None else str(own))
        if own is not None:
            raise own
        for rank, text in texts.items():
            if text is not None:
                raise AutoparError(f"rank {rank} stopped, so this rank stops as well: {text}")
        return result  # type: ignore[return-value]

    def decided_by_first(self, decide: Callable[[], Result]) -> Result:
        """What `decide` gives on the first rank, on all ranks."""
        if self.group is None:
            return decide()
        sent: list[Any] = [None]
        own: AutoparError | None = None
        if dist.get_rank() == self.ranks[0]:
            try:
                sent = [decide()]
            except AutoparError as error:
                own, sent = error, [_Failure(error)]
        dist.broadcast_object_list(sent, src=self.ranks[0], group=self.group, device=self.device)
        if own is not None:
            raise own
        if isinstance(sent[0], _Failure):
            raise sent[0].error
        return sent[0]  # type: ignore[no-any-return]

    def same(self, facts: Mapping[str, str], fix: str) -> None:
        """Raise on all ranks, naming the first fact that differs, unless all ranks have the same facts."""
        text = "\n".join(f"{name}: {fact}" for name, fact in facts.items())
        if len(set(self._gather(digest(text)).values())) == 1:
            return
        everyone = self._gather(dict(facts))
        first = self.ranks[0]
        for rank, theirs in everyone.items():
            for name in dict.fromkeys((*everyone[first], *theirs)):
                a, b = everyone[first].get(name, "nothing"), theirs.get(name, "nothing")
                if a != b:
                    raise AutoparError(
                        f"the ranks do not have the same {name}: {a} on rank {first}, {b} on rank {rank}\nfix: {fix}"
                    )
        raise AssertionError("the facts differ in their order only")

    def same_values(self, sums: Mapping[str, tuple[tuple[int, ...], int]], fix: Callable[[str], str]) -> None:
        """Raise on all ranks unless ranks with the same piece of a tensor have the same checksum of it."""
        everyone = self._gather(dict(sums))
        for name in sums:
            seen: dict[tuple[int, ...], tuple[int, int]] = {}
            for rank, theirs in everyone.items():
                piece, value = theirs[name]
                other, first = seen.setdefault(piece, (rank, value))
                if value != first:
                    raise AutoparError(
                        f"{name} should have the same values on rank {other} and rank {rank}, and has not\n"
                        f"fix: {fix(name)}"
                    )

    def begin(self, own: int, along: Tensor | None = None) -> Pending:
        """Begin to compare one number below 2**63, and send some 64-bit numbers along.

        What is sent is of one size whatever is compared, so that ranks in different calls meet here.
        """
        assert self.group is not None, "there is somebody to compare with"
        mine = torch.tensor((own, *(0,) * ROOM), dtype=torch.int64, device=self.device)
        if along is not None:
            mine.narrow(0, 1, along.numel()).copy_(along)
        everyone = mine.new_empty(self.size * len(mine))
        # Not by the function of torch.distributed, which in a small step takes longer than what it calls.
        work = self.group._allgather_base(everyone, mine)
        return Pending(own, everyone.view(self.size, -1), work)

    def places(self, ranks: Iterable[int]) -> list[int] | slice:
        """In which rows of a comparison these ranks stand."""
        found = [self.ranks.index(rank) for rank in ranks]
        return slice(None) if found == list(range(self.size)) else found

    def numbers(self, *own: int) -> list[list[int]]:
        """The numbers of all ranks, each below 2**63: one small collective."""
        if self.group is None:
            return [list(own)]
        mine = torch.tensor(own, dtype=torch.int64, device=self.device)
        everyone = mine.new_empty(self.size * len(own))
        dist.all_gather_single(everyone, mine, group=self.group)
        return everyone.view(self.size, len(own)).tolist()

    def _gather(self, own: Result) -> dict[int, Result]:
        if self.group is None:
            return {0: own}
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, own, group=self.group)
        return dict(zip(self.ranks, everyone, strict=True))


def digest(text: str) -> int:
    """A number below 2**63 that is the same in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def checksum(tensor: Tensor) -> int:
    """A number that differs, but for one in four thousand million, when some bit of the tensor does."""
    if tensor.is_meta or tensor.numel() == 0:
        return 0
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    return zlib.crc32(flat.numpy().tobytes())


def kind_of(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
