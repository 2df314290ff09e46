"""Saved tensors of offloaded layers, on the host until the backward needs them.

An op of such a layer saves a handle; its storage is copied to pinned memory of the host on a stream of its own. The
tensors of a layer stay on the device until the next offloaded layer has run, so that the copies run beside it. The
backward of a layer brings back those of the layer before, one layer ahead. Tensors of the last layer are still there.

Where the device is a CPU, the host is simulated by a marked copy, and the tensor on the device is freed as well.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import GraphModule
from torch.multiprocessing.reductions import StorageWeakRef

from autopar.errors import AutoparError
from autopar.ir.analysis.host_memory import simulated_host_memory
from autopar.sharding.offload import LEAST_BYTES

__all__ = ["HostCopies", "OffloadedOps", "copy_on_stream", "empty_on_host", "wait_for"]


class HostCopies:
    """Copies to the host of all offloaded layers of one graph."""

    def __init__(self) -> None:
        # The call of the layer that is running.
        self.running: _LayerCall | None = None
        # The last one whose tensors are still on the device.
        self.last: weakref.ref[_LayerCall] | None = None
        # Keyed by storage and version: a tensor that is saved twice is copied once.
        self.known: weakref.WeakValueDictionary[tuple[int, int], _HostStorage] = weakref.WeakValueDictionary()
        self.streams: dict[torch.device, Any] = {}

    def stream(self, device: torch.device) -> Any:
        """Return the stream of the copies; None on a CPU, which copies at once."""
        if device.type == "cpu":
            return None
        if device not in self.streams:
            self.streams[device] = torch.get_device_module(device).Stream(device)
        return self.streams[device]

    def begin(self) -> None:
        self.running = _LayerCall(self)

    def end(self) -> None:
        """Free the tensors of the offloaded layer before the one that has run."""
        call, self.running = self.running, None
        assert call is not None, "a layer has begun"
        if not call.moved:
            return
        before = self.last() if self.last is not None else None
        if before is not None:
            call.before = weakref.ref(before)
            before.leave(call)
        self.last = weakref.ref(call)


class OffloadedOps(nn.Module):
    """Consecutive ops of an offloaded layer; `stays` tells which inputs are not moved."""

    def __init__(
        self, body: GraphModule, stays: Sequence[bool], copies: HostCopies, is_first: bool, is_last: bool
    ) -> None:
        super().__init__()
        self.body, self.stays, self.copies = body, tuple(stays), copies
        self.is_first, self.is_last = is_first, is_last

    # A compiled graph keeps what its partitioner saves on the device.
    @torch.compiler.disable(  # type: ignore[no-untyped-call, untyped-decorator]
        reason="layers under 'recompute offload' are not compiled; fix: write 'recompute selective' to compile them"
    )
    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        if not torch.is_grad_enabled():
            return self.body(*inputs)  # type: ignore[no-any-return]
        # Also after a call that failed.
        if self.is_first or self.copies.running is None:
            self.copies.begin()
        call = self.copies.running
        assert call is not None, "a layer has begun"
        staying = [one for one, stays in zip(inputs, self.stays, strict=True) if stays and isinstance(one, Tensor)]
        call.staying = {one.untyped_storage()._cdata for one in staying if one.layout is torch.strided}
        with saved_tensors_hooks(call.save, _restored):
            results: tuple[Any, ...] = self.body(*inputs)
        if self.is_last:
            self.copies.end()
        return results


@dataclass(eq=False)
class _HostStorage:
    """Storage on the host, on the device, or on both."""

    copies: HostCopies
    # A weak reference to the storage: no other one gets its address.
    key: StorageWeakRef
    host: Tensor
    device: torch.device
    # Result of an op, and its version when it was saved; None when it has left the device.
    source: Tensor | None
    version: int
    # Bytes that came back.
    device_copy: Tensor | None = None
    # Ends of the copies to the host and back, on a device with streams.
    sent: Any = None
    arrived: Any = None

    @staticmethod
    def of(copies: HostCopies, tensor: Tensor) -> _HostStorage:
        """Start the copy of a tensor's storage to the host."""
        storage, device = tensor.untyped_storage(), tensor.device
        stream = copies.stream(device)
        source = tensor.detach()
        whole = _bytes_of(source)
        count = storage.nbytes()
        host = empty_on_host(count, device)
        made = _HostStorage(copies, StorageWeakRef(storage), host, device, source, tensor._version)  # type: ignore[no-untyped-call]
        made.sent = copy_on_stream(whole, host, whole, stream)
        return made

    def leave(self) -> None:
        """Free the tensor on the device when its copy has arrived."""
        if self.source is not None:
            self._check_version()
            wait_for(self.sent, self.device)
            self.source = None

    def come_back(self) -> None:
        """Start the copy to the device, if the tensor is not there."""
        if self.source is None and self.device_copy is None:
            self.device_copy = torch.empty(self.host.numel(), dtype=torch.uint8, device=self.device)
            stream = self.copies.stream(self.device)
            self.arrived = copy_on_stream(self.host, self.device_copy, self.device_copy, stream)

    def on_device(self) -> Tensor:
        """Return the bytes on the device."""
        if self.source is not None:
            self._check_version()
            return self.source
        self.come_back()
        assert self.device_copy is not None, "it comes back"
        if self.arrived is not None:
            wait_for(self.arrived, self.device)
            self.arrived = None
        return self.device_copy

    def _check_version(self) -> None:
        assert self.source is not None, "it is on the device"
        if self.source._version != self.version:
            raise AutoparError(
                "a tensor that the backward needs was changed in place, while it was copied to the host\n"
                "fix: write 'recompute none @...' for its layer, or do not change it in place"
            )


@dataclass(eq=False)
class _SavedView:
    """Stand in autograd's graph for a saved tensor: a view of a storage."""

    call: _LayerCall
    storage: _HostStorage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(eq=False)
class _LayerCall:
    """Tensors that one call of a layer has saved."""

    copies: HostCopies
    moved: list[weakref.ref[_HostStorage]] = field(default_factory=list)
    # Addresses of storages that are not moved.
    staying: set[int] = field(default_factory=set)
    before: weakref.ref[_LayerCall] | None = None
    has_begun: bool = False

    def save(self, tensor: Tensor) -> Tensor | _SavedView:
        if not _is_plain(tensor):
            return tensor
        storage = tensor.untyped_storage()
        if storage._cdata in self.staying or storage.nbytes() < LEAST_BYTES:
            return tensor
        key = storage._cdata, tensor._version
        found = self.copies.known.get(key)
        if found is None:
            found = self.copies.known[key] = _HostStorage.of(self.copies, tensor)
        if not any(one() is found for one in self.moved):
            self.moved.append(weakref.ref(found))
        place = tensor.size(), tensor.stride(), int(tensor.storage_offset())
        return _SavedView(self, found, tensor.dtype, *place)

    def leave(self, following: _LayerCall) -> None:
        """Free what is on the device, but for what the following layer has saved as well."""
        kept = {id(one()) for one in following.moved}
        for reference in self.moved:
            one = reference()
            if one is not None and id(one) not in kept:
                one.leave()

    def begin_backward(self) -> None:
        """Bring back the tensors of this layer, and ahead of their use those of the one before."""
        if self.has_begun:
            return
        self.has_begun = True
        before = self.before() if self.before is not None else None
        for call in (self, before):
            if call is not None:
                for reference in call.moved:
                    one = reference()
                    if one is not None:
                        one.come_back()


def _restored(saved: Tensor | _SavedView) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    saved.call.begin_backward()
    whole = saved.storage.on_device()
    view = torch.empty(0, dtype=saved.dtype, device=whole.device)
    return view.set_(whole.untyped_storage(), saved.offset, saved.size, saved.stride)


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is a strided view of memory of a device."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.device.type == "meta":
        return False
    return not tensor.is_conj() and not tensor.is_neg()


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the whole storage of a tensor as bytes."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def empty_on_host(count: int, device: torch.device) -> Tensor:
    """Return bytes of the host of a device, pinned; a CPU simulates its host."""
    if device.type == "cpu":
        return simulated_host_memory(count)
    return torch.empty(count, dtype=torch.uint8, pin_memory=True)


def copy_on_stream(source: Tensor, target: Tensor, on_device: Tensor, stream: Any) -> Any:
    """Copy on a stream, after what the device has been given; return the end, None where the copy is done."""
    if stream is None:
        target.copy_(source)
        return None
    module = torch.get_device_module(on_device.device)
    stream.wait_stream(module.current_stream(on_device.device))
    with module.stream(stream):
        target.copy_(source, non_blocking=True)
        end = module.Event()
        end.record(stream)
    # Memory that dies before the copy has ended is not used for anything else.
    on_device.record_stream(stream)
    return end


def wait_for(end: Any, device: torch.device) -> None:
    if end is not None:
        torch.get_device_module(device).current_stream(device).wait_event(end)
