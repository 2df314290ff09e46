"""Replicas meet through servers: bulk synchronous, stale synchronous or not synchronised at all.

The vector is cut into equal slices, one on each of the first replicas. A replica pushes what it has trained since its
last pull to all servers, and gets the slices back once no other replica is more than `stale` pushes behind. A call that
has to wait is a future on the server, no thread. Messages go over `torch.distributed.rpc`.

M. Li et al., "Scaling Distributed Machine Learning with the Parameter Server", 2014; Q. Ho et al., "More Effective
Distributed ML via a Stale Synchronous Parallel Parameter Server", 2013.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import rpc
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.rendezvous import register_rendezvous_handler
from torch.futures import Future

from autopar.errors import AutoparError
from autopar.lowering.collectives.process_groups import limit_seconds_of
from autopar.lowering.collectives.start_group import choose_gloo_interface
from autopar.runtime.sync.coders import code_of, with_feedback
from autopar.runtime.sync.mean import outer_step
from autopar.runtime.sync.meeting import Meeting
from autopar.sharding.layout.drift import DriftStatement, OuterOptimizer

__all__ = ["ServerMeeting"]

SCHEME = "autopar"
# Threads of a rank that answer calls: they add up vectors, and never wait for another replica.
THREADS = 4
# A replica that has left holds back nobody.
LEFT = 10**9


class _ServerSlice:
    """Slice of the parameters on one server, with the clocks of all replicas."""

    def __init__(self, values: Tensor, count: int, statement: DriftStatement) -> None:
        self.values, self.stale = values, statement.stale
        self.outer: OuterOptimizer = statement.outer
        self.momentum = torch.zeros_like(values) if self.outer.momentum else None
        self.code = None if statement.coder is None else code_of(statement.coder)
        # Pushes so far, and rows of the latest one, of each replica.
        self.clocks, self.rows = [0] * count, [0.0] * count
        # Pushes of a round that is not complete, where all replicas wait for all.
        self.round: dict[int, Tensor] = {}
        self.waiting: list[tuple[int, Future[Tensor]]] = []
        self.widest = 0
        self._lock = threading.Lock()

    def push(self, replica: int, sent: Tensor, rows: float) -> Future[Tensor]:
        """Add what a replica has trained; its future is the slice, once the replica may go on."""
        answer: Future[Tensor] = Future()
        length, dtype = len(self.values), self.values.dtype
        delta = sent if self.code is None else self.code.decode(sent, length, dtype) if length else self.values[:0]
        with self._lock:
            self.clocks[replica] += 1
            self.rows[replica] = rows
            self.waiting.append((replica, answer))
            if self.stale == 0:
                self.round[replica] = delta
                self._end_round()
            else:
                # Replicas that have not pushed yet count as this one.
                total = sum(each or rows for each in self.rows)
                outer_step(self.outer, self.values, delta * (rows / total), self.momentum)
            there = [clock for clock in self.clocks if clock < LEFT]
            self.widest = max(self.widest, max(there) - min(there))
            free, values = self._released(), self.values.clone()
        for each in free:
            each.set_result(values)
        return answer

    def leave(self, replica: int) -> None:
        """Wait for a replica no longer."""
        with self._lock:
            self.clocks[replica] = LEFT
            self._end_round()
            free, values = self._released(), self.values.clone()
        for each in free:
            each.set_result(values)

    def _end_round(self) -> None:
        present = [replica for replica, clock in enumerate(self.clocks) if clock < LEFT]
        if not self.round or set(self.round) < set(present):
            return
        total = sum(self.rows[replica] for replica in self.round)
        # In the order of the replicas, so that the sum does not depend on who came first.
        delta = torch.zeros_like(self.values)
        for replica in sorted(self.round):
            delta += self.round[replica] * (self.rows[replica] / total)
        outer_step(self.outer, self.values, delta, self.momentum)
        self.round = {}

    def _released(self) -> list[Future[Tensor]]:
        """Return the futures of replicas that may go on."""
        least = min(self.clocks)

        def may_go(replica: int) -> bool:
            if self.stale == 0:
                return not self.round
            return self.stale is None or self.clocks[replica] - least <= self.stale

        free = [future for replica, future in self.waiting if may_go(replica)]
        self.waiting = [one for one in self.waiting if not may_go(one[0])]
        return free


# Slices of this process by the number of their meeting; remote calls find them here.
_SLICES: dict[int, _ServerSlice] = {}
_numbers = iter(range(2**62))


@rpc.functions.async_execution  # type: ignore[untyped-decorator]  # torch has no types for it
def _push(number: int, replica: int, sent: Tensor, rows: float) -> Future[Tensor]:
    return _SLICES[number].push(replica, sent, rows)


def _leave(number: int, replica: int) -> None:
    _SLICES[number].leave(replica)


def _state(number: int) -> tuple[Tensor, Tensor, int]:
    one = _SLICES[number]
    return one.values, torch.zeros_like(one.values) if one.momentum is None else one.momentum, one.widest


def _set_state(number: int, values: Tensor, momentum: Tensor) -> None:
    one = _SLICES[number]
    one.values.copy_(values)
    if one.momentum is not None:
        one.momentum.copy_(momentum)


class ServerMeeting(Meeting):
    """Meetings with servers that hold the parameters."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.number = next(_numbers)
        # Parameters at the last pull; None before the first step.
        self.base: Tensor | None = None
        self._is_serving = self._is_loaded = False
        size, servers = self.vector.size, self.statement.servers
        self.ends = [size * i // servers for i in range(servers + 1)]
        self._rows = 0.0
        self.code = None if self.statement.coder is None else code_of(self.statement.coder)
        self.lost = torch.zeros(size if self.code is not None else 0, dtype=self.vector.dtype)

    def common(self) -> Tensor | None:
        base = self._read_base()
        # Replicas that a checkpoint found ahead of others go on from parameters of their own.
        return None if self._is_loaded and self.statement.stale != 0 else base

    def _read_base(self) -> Tensor:
        if self.base is None:
            self.base = self.vector.read(0, self.vector.size).cpu()
        return self.base

    def begin(self) -> None:
        base = self._read_base()
        if self._is_serving:
            return
        self._is_serving = True
        _start_rpc(self.group.group)
        if self.group.index < self.statement.servers:
            start, stop = self.ends[self.group.index : self.group.index + 2]
            _SLICES[self.number] = _ServerSlice(base[start:stop].clone(), self.group.count, self.statement)
        dist.barrier(self.group.group)

    def after_step(self, step: int, rows: float) -> None:
        self._rows += rows
        if step % self.statement.every:
            return
        base, x = self._read_base(), self.vector.read(0, self.vector.size).cpu()
        delta, rows, self._rows = base - x, self._rows, 0.0
        futures = []
        for server, (start, stop) in self._slices():
            sent = delta[start:stop].clone()  # else the message would have the whole vector
            if self.code is not None:
                sent = with_feedback(self.code, sent, self.lost[start:stop])
            self.sent_bytes += sent.numel() * sent.element_size()
            call = (self.number, self.group.index, sent, rows)
            futures.append(rpc.rpc_async(server, _push, args=call))
        self._pulled([future.wait() for future in futures])

    def finish(self) -> None:
        """Leave: the other replicas no longer wait for this one. All get the parameters of the servers."""
        if not self._is_serving:
            return
        for server, _ in self._slices():
            rpc.rpc_sync(server, _leave, args=(self.number, self.group.index))
        dist.barrier(self.group.group)
        self._pulled([values for values, _, _ in self._states()])
        dist.barrier(self.group.group)  # no server goes while another replica reads
        self._is_serving = False
        _SLICES.pop(self.number, None)

    def widest(self) -> int:
        """Return the largest difference of the clocks of two replicas so far; a push counts before it waits."""
        return max(widest for _, _, widest in self._states())

    def _pulled(self, slices: list[Tensor]) -> None:
        self.base = torch.cat(slices)
        if self.statement.stale != 0:
            self.vector.agree(self.base)
        self.vector.write(0, self.vector.size, self.base.to(self.vector.device))

    def _slices(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Yield the name and the range of each server."""
        for index in range(self.statement.servers):
            yield _name(self.group.ranks[index]), (self.ends[index], self.ends[index + 1])

    def _states(self) -> list[tuple[Tensor, Tensor, int]]:
        return [rpc.rpc_sync(server, _state, args=(self.number,)) for server, _ in self._slices()]

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        self.begin()
        dist.barrier(self.group.group)  # all pushes of earlier steps have been answered
        found = self._states()
        common = self._tensors(torch.cat([values for values, _, _ in found]), "server")
        common |= self._tensors(torch.cat([momentum for _, momentum, _ in found]), "momentum")
        own = self._tensors(self._read_base(), "base") | {"pushed": torch.tensor(self._rows, dtype=torch.float64)}
        return common, own | (self._tensors(self.lost, "lost") if self.code is not None else {})

    def load(self, common: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        self.begin()
        values, momentum = (self.vector.vector(common, name).cpu() for name in ("server", "momentum"))
        if self.group.index == 0:
            for server, (start, stop) in self._slices():
                rpc.rpc_sync(server, _set_state, args=(self.number, values[start:stop], momentum[start:stop]))
        self.base = self.vector.vector(own, "base").cpu()
        self._rows, self._is_loaded = float(own["pushed"]), True
        if self.code is not None:
            self.lost.copy_(self.vector.vector(own, "lost"))
        dist.barrier(self.group.group)

    def _tensors(self, vector: Tensor, name: str) -> dict[str, Tensor]:
        return self.vector.tensors(vector.to(self.vector.device), name)


def _name(rank: int) -> str:
    return f"autopar{rank}"


def _start_rpc(group: Any) -> None:
    """Start remote calls between all ranks, once in a process."""
    if _IS_STARTED:
        return
    if torch._C._distributed_rpc._is_current_rpc_agent_set():
        raise AutoparError(
            "torch.distributed.rpc is in use already: expected it to be free for the servers of a 'drift' line\n"
            "fix: do not call init_rpc in this program, or meet by mean"
        )
    # As Gloo: where it must not look up the name of the host, neither may TensorPipe.
    choose_gloo_interface()
    if "GLOO_SOCKET_IFNAME" in os.environ:
        os.environ.setdefault("TP_SOCKET_IFNAME", os.environ["GLOO_SOCKET_IFNAME"])
    register_rendezvous_handler(SCHEME, _rendezvous)  # type: ignore[no-untyped-call]
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=THREADS, rpc_timeout=limit_seconds_of(group), init_method=f"{SCHEME}://"
    )
    rank = dist.get_rank()
    world = dist.get_world_size()
    rpc.init_rpc(_name(rank), rank=rank, world_size=world, rpc_backend_options=options)  # type: ignore[no-untyped-call]
    _IS_STARTED.add(SCHEME)
    # Not graceful, which would wait for ranks that may be gone.
    atexit.register(rpc.shutdown, graceful=False)


# Has the scheme once remote calls run.
_IS_STARTED: set[str] = set()


def _rendezvous(url: str, **_: Any) -> Iterator[tuple[Any, int, int]]:
    """Meet in the store of the process group, which all ranks have."""
    yield PrefixStore("autopar_rpc", _get_default_store()), dist.get_rank(), dist.get_world_size()
