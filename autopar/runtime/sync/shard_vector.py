"""The trained parameters of a rank as one vector, of which meetings read and write ranges."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

__all__ = ["ShardVector"]

# Elements that a meeting sends in one message: large enough for the full rate of a link.
BUCKET = 2**24


class ShardVector:
    """This rank's shards of the parameters that are trained, as one vector of the dtype of their sums.

    No view of a parameter is kept, so a load may replace tensors between steps.
    """

    def __init__(self, named: Callable[[], Mapping[str, nn.Parameter]]) -> None:
        self._named = named
        found = self.parameters()
        self.names = tuple(found)
        sizes = [_local(parameter).numel() for parameter in found.values()]
        # Where each parameter begins, and the end of the last one.
        self.starts = [0, *accumulate(sizes)]
        first = next(iter(found.values()), None)
        self.device = torch.device("cpu") if first is None else _local(first).device
        wide = any(parameter.dtype == torch.float64 for parameter in found.values())
        # Sums of 16-bit numbers would lose what a step changes.
        self.dtype = torch.float64 if wide else torch.float32

    @property
    def shardings(self) -> str:
        """Return names, local shapes and placements of all parameters, as text."""
        shapes = (
            (name, tuple(_local(one).shape), getattr(one, "placements", ())) for name, one in self.parameters().items()
        )
        return repr(list(shapes))

    @property
    def size(self) -> int:
        return self.starts[-1]

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that are trained, by name."""
        return {name: parameter for name, parameter in self._named().items() if parameter.requires_grad}

    def buckets(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return ranges of one message each."""
        return [(first, min(first + BUCKET, stop)) for first in range(start, stop, BUCKET)]

    def read(self, start: int, stop: int) -> Tensor:
        """Return a copy of a range of the parameters."""
        return self._copied(start, stop, lambda parameter: parameter)

    def read_gradients(self, start: int, stop: int) -> Tensor:
        """Return a copy of a range of the gradients; zeros where a parameter has none."""
        return self._copied(start, stop, lambda parameter: parameter.grad)

    def write(self, start: int, stop: int, values: Tensor) -> None:
        """Set a range of the parameters."""
        for parameter, piece, place in self._pieces(start, stop):
            with torch.no_grad():
                _set(_local(parameter), piece, values[place : place + piece[1] - piece[0]])
            # Gathered copies of the parameter are stale, which a DTensor shows by its version.
            torch.autograd.graph.increment_version(parameter)

    def write_gradients(self, start: int, stop: int, values: Tensor) -> None:
        """Set a range of the gradients; a parameter that no replica has a gradient of gets none."""
        for parameter, piece, place in self._pieces(start, stop):
            value = values[place : place + piece[1] - piece[0]]
            if parameter.grad is None:
                if not bool(value.any()):
                    continue
                parameter.grad = torch.zeros_like(parameter)
            _set(_local(parameter.grad), piece, value)

    def agree(self, vector: Tensor) -> None:
        """Give ranks of one replica that have the same shard the values of the first of them.

        They need it where a replica waits for some messages of others alone: its ranks then have seen different ones.
        """
        meshes: list[DeviceMesh] = [one.device_mesh for one in self.parameters().values() if isinstance(one, DTensor)]
        for dim in range(meshes[0].ndim if meshes else 0):
            # Along each axis from its first rank, in one order, so the first rank of all axes decides.
            copied = [
                range(*ends)
                for one, *ends in zip(self.parameters().values(), self.starts, self.starts[1:], strict=False)
                if isinstance(one, DTensor) and one.device_mesh.size(dim) > 1 and one.placements[dim].is_replicate()
            ]
            if not copied:
                continue
            group = meshes[0].get_group(dim)
            values = torch.cat([vector[one.start : one.stop] for one in copied]).to(self.device)
            dist.broadcast(values, group=group, group_src=0)
            pieces = torch.split(values.to(vector.device), [len(one) for one in copied])
            for one, piece in zip(copied, pieces, strict=True):
                vector[one.start : one.stop] = piece

    def tensors(self, vector: Tensor, prefix: str) -> dict[str, Tensor]:
        """Return a vector as tensors of the parameters' shardings, for a checkpoint."""
        found = {}
        for number, (name, parameter) in enumerate(self.parameters().items()):
            made = torch.zeros_like(parameter.detach(), dtype=self.dtype)
            local = _local(made)
            local.copy_(vector[self.starts[number] : self.starts[number + 1]].view(local.shape))
            found[f"{prefix}.{name}"] = made
        return found

    def vector(self, tensors: Mapping[str, Any], prefix: str) -> Tensor:
        """Return the vector of such tensors. The inverse of `tensors`."""
        pieces = [_local(tensors[f"{prefix}.{name}"]).reshape(-1) for name in self.names]
        return torch.cat([torch.empty(0), *pieces]).to(self.device, self.dtype)

    def _copied(self, start: int, stop: int, of: Callable[[nn.Parameter], Tensor | None]) -> Tensor:
        found = torch.zeros(stop - start, dtype=self.dtype, device=self.device)
        for parameter, piece, place in self._pieces(start, stop):
            tensor = of(parameter)
            if tensor is not None:
                values = _local(tensor.detach()).reshape(-1)[piece[0] : piece[1]]
                found[place : place + piece[1] - piece[0]].copy_(values)
        return found

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[nn.Parameter, tuple[int, int], int]]:
        """Yield the parameters of a range, with the part of each, and where the part begins in the range."""
        parameters = list(self.parameters().values())
        for number in range(bisect_right(self.starts, start) - 1, len(parameters)):
            first, last = self.starts[number], self.starts[number + 1]
            if first >= stop:
                return
            begin, end = max(start, first), min(stop, last)
            if begin < end:
                yield parameters[number], (begin - first, end - first), begin - start


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _set(target: Tensor, piece: tuple[int, int], values: Tensor) -> None:
    """Set a range of the elements of a tensor, in the order of a contiguous one."""
    if target.is_contiguous():
        target.view(-1)[piece[0] : piece[1]].copy_(values)
        return
    whole = target.reshape(-1).clone()
    whole[piece[0] : piece[1]].copy_(values)
    target.copy_(whole.view(target.shape))
