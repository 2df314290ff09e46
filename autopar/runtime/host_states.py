"""Optimizer states in memory of the host: they come to the device for the step of their parameters, in chunks.

A chunk has parameters in order, at most as much as the largest one. While one chunk is updated, the states of the next
one are copied to the device; those that were updated go back beside it. So two chunks are on the device at most. Each
element sees the same operations as in a step of all parameters at once.

Where the device is a CPU, its host is simulated by marked memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from autopar.ir.analysis.host_memory import ON_HOST
from autopar.lowering.modules.host_copies import copy_on_stream, empty_on_host, wait_for

__all__ = ["HostShard", "step_from_host"]


class HostShard(Protocol):
    """Shard of a parameter, with its states by name; those of its shape live on the host."""

    local: Tensor
    states: dict[str, Any]


def step_from_host(
    optimizer: Optimizer, groups: Sequence[Sequence[HostShard]], keep: Callable[[HostShard, str, Any], None]
) -> None:
    """Update the shards of each group of an optimizer; `keep` takes states that are new."""
    device = next(shard.local.device for group in groups for shard in group)
    stream = None if device.type == "cpu" else torch.get_device_module(device).Stream(device)
    chunks = list(_chunks(groups))
    coming = _load(chunks[0], stream)
    stored: Any = None
    for number, chunk in enumerate(chunks):
        states, arrived = coming
        if number + 1 < len(chunks):
            # Two chunks are on the device at most: the one before this has left.
            _wait_on_host(stored)
            coming = _load(chunks[number + 1], stream)
        wait_for(arrived, device)
        _step(optimizer, chunk, states)
        stored = _store(chunk, states, stream, keep)
    _wait_on_host(stored)  # what reads the states on the host next does not know the stream


_Chunk = list[tuple[int, HostShard]]
_States = dict[Tensor, dict[str, Any]]


def _chunks(groups: Sequence[Sequence[HostShard]]) -> Iterator[_Chunk]:
    """Yield the shards, with the number of the group of each, in pieces of at most the size of the largest."""
    largest = max(shard.local.nbytes for group in groups for shard in group)
    chunk: _Chunk = []
    size = 0
    for number, group in enumerate(groups):
        for shard in group:
            if chunk and size + shard.local.nbytes > largest:
                yield chunk
                chunk, size = [], 0
            chunk.append((number, shard))
            size += shard.local.nbytes
    yield chunk


def _load(chunk: _Chunk, stream: Any) -> tuple[_States, Any]:
    """Start the copies of a chunk's states to the device; return these, and the end of the last copy."""
    found: _States = {}
    end = None
    for _, shard in chunk:
        own = found[shard.local] = dict(shard.states)
        for name, value in shard.states.items():
            if _is_on_host(value, shard.local.device):
                own[name] = torch.empty(value.shape, dtype=value.dtype, device=shard.local.device)
                end = copy_on_stream(value, own[name], own[name], stream)
    return found, end


def _step(optimizer: Optimizer, chunk: _Chunk, states: _States) -> None:
    """Run the step of an optimizer for some shards alone."""
    made: Optimizer = object.__new__(type(optimizer))
    made.__dict__.update(optimizer.__dict__)
    members: dict[int, list[Tensor]] = {}
    for number, shard in chunk:
        members.setdefault(number, []).append(shard.local)
    made.param_groups = [{**optimizer.param_groups[number], "params": own} for number, own in members.items()]
    made.state = defaultdict(dict, {local: own for local, own in states.items() if own})
    # Without the hooks around a step: they run once, for all parameters.
    step: Any = type(optimizer).step
    getattr(step, "__wrapped__", step)(made)
    for local in states:
        states[local] = made.state.get(local, {})


def _store(chunk: _Chunk, states: _States, stream: Any, keep: Callable[[HostShard, str, Any], None]) -> Any:
    """Start the copies of a chunk's states to the host; return the end of the last one."""
    end = None
    for _, shard in chunk:
        device = shard.local.device
        for name, value in states.pop(shard.local).items():
            host = shard.states.get(name)
            if not isinstance(value, Tensor) or value.shape != shard.local.shape:
                if host is not value:
                    keep(shard, name, value)
                continue
            if not isinstance(host, Tensor) or not _is_on_host(host, device):
                host = empty_on_host(value.nbytes, device).view(value.dtype).view(value.shape)
                keep(shard, name, host)
            end = copy_on_stream(value, host, value, stream)
    return end


def _is_on_host(value: Any, device: torch.device) -> bool:
    if not isinstance(value, Tensor) or not value.dim():
        return False
    if device.type == "cpu":
        return hasattr(value.untyped_storage(), ON_HOST)
    return value.device.type == "cpu"


def _wait_on_host(end: Any) -> None:
    if end is not None:
        end.synchronize()
