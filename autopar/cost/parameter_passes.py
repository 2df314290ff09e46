"""Bytes of the passes over parameters and gradients: casts, copies into buckets, the optimizer."""

from __future__ import annotations

import torch

from autopar.cost.compute.op_time import CAST_BYTES, FLOAT8_LAUNCHES, local_bytes
from autopar.cost.compute.optimizers import optimizer_of
from autopar.ir.graph import NamedGraph
from autopar.ir.precision import Precision
from autopar.ir.values import NamedTensor
from autopar.mesh import SubMesh
from autopar.sharding.options import sum_dtype
from autopar.sharding.sharding import Sharding

__all__ = ["CODING_LAUNCHES", "ParameterPasses", "coding_bytes"]

# Kernels that cast a shard to float8, and decode what arrives.
CODING_LAUNCHES = FLOAT8_LAUNCHES + 3


class ParameterPasses:
    """Bytes that passes over one parameter, or its gradient, read and write on one rank."""

    graph: NamedGraph
    axes: SubMesh
    precision: Precision
    # Micro-batches share weights in float8.
    keeps_casts: bool
    # Elements of the largest shard of each parameter, by sharding: several passes ask for each.
    numels: dict[tuple[str, Sharding], float]

    def cast_bytes(self, name: str, stored: Sharding) -> float:
        """Return the bytes that casting a stored parameter to the dtype of the compute reads and writes."""
        tensor = self.graph.tensors[name]
        return _cast_bytes(self._numel(name, stored), tensor.stored_dtype(self.precision), tensor.dtype)

    def coding_bytes_of(self, name: str, stored: Sharding, used: Sharding) -> float:
        """Return the bytes that a gather of a parameter in float8 reads and writes beside the message."""
        return coding_bytes(self._numel(name, stored), self._numel(name, used))

    def casts_apart(self, name: str) -> bool:
        """Return whether a weight is cast to float8 apart from the products that read it, or its view."""
        return self.keeps_casts and name in self.graph.float8_weights

    def weight_cast_bytes(self, name: str, used: Sharding) -> float:
        """Return the bytes that casting a weight to float8 reads and writes, in one order of memory."""
        return self._numel(name, used) * CAST_BYTES

    def float8_bytes(self, name: str, used: Sharding) -> float:
        """Return the bytes of a weight in float8, in the orders of the forward and of the backward."""
        return self._numel(name, used) * (1 + self.graph.exported.grad_enabled)

    def gradient_cast_bytes(self, name: str, used: Sharding, stored: Sharding, summed: bool) -> float:
        """Return the bytes of casting a gradient before it is reduced, and to the dtype of the stored parameter.

        With `summed` it is a sum over micro-batches.
        """
        return self.reduced_cast_bytes(name, used, summed) + self.stored_cast_bytes(name, stored)

    def reduced_cast_bytes(self, name: str, used: Sharding, summed: bool) -> float:
        """Return the bytes of casting a gradient before it is reduced."""
        made, reduced = self._gradient_dtypes(self.graph.tensors[name], summed)
        return _cast_bytes(self._numel(name, used), made, reduced)

    def stored_cast_bytes(self, name: str, stored: Sharding) -> float:
        """Return the bytes of casting a reduced gradient to the dtype of the stored parameter."""
        tensor = self.graph.tensors[name]
        reduced = self.precision.reduced(tensor.dtype)
        return _cast_bytes(self._numel(name, stored), reduced, tensor.stored_dtype(self.precision))

    def gradient_copy_bytes(self, name: str, used: Sharding, summed: bool) -> float:
        """Return the bytes of the copy of a gradient into the buffer of its bucket, if nothing else makes that copy.

        A sum in another dtype begins in the buffer.
        """
        tensor = self.graph.tensors[name]
        made, reduced = self._gradient_dtypes(tensor, summed)
        copies = made == reduced and not (summed and made != tensor.dtype)
        return 2.0 * self._numel(name, used) * reduced.itemsize if copies else 0.0

    def _gradient_dtypes(self, tensor: NamedTensor, summed: bool) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtype of a gradient, summed over micro-batches or not, and that in which it is reduced."""
        return sum_dtype(tensor.dtype) if summed else tensor.dtype, self.precision.reduced(tensor.dtype)

    def optimizer_bytes(self, name: str, stored: Sharding, optimizer: str) -> float:
        """Return the bytes that the optimizer reads and writes for one parameter."""
        tensor, states = self.graph.tensors[name], optimizer_of(optimizer).states
        # Parameter and states are read and written, the gradient is read.
        each = 3 * tensor.stored_dtype(self.precision).itemsize
        each += 2 * states * self.precision.state(tensor.dtype).itemsize
        return self._numel(name, stored) * each

    def state_bytes(self, name: str, stored: Sharding, optimizer: str) -> float:
        """Return the bytes of the states of one parameter."""
        tensor, states = self.graph.tensors[name], optimizer_of(optimizer).states
        return self._numel(name, stored) * states * self.precision.state(tensor.dtype).itemsize

    def _numel(self, name: str, sharding: Sharding) -> float:
        found = self.numels.get((name, sharding))
        if found is None:
            found = local_bytes(self.graph, name, sharding, self.axes) / self.graph.tensors[name].dtype.itemsize
            self.numels[name, sharding] = found
        return found


def coding_bytes(stored: float, used: float) -> float:
    """Return the bytes read and written to gather so many elements of a shard in float8, as so many elements."""
    # What arrives is cast and scaled back.
    return stored * CAST_BYTES + used * ((1 + 2) + (2 + 2))


def _cast_bytes(numel: float, source: torch.dtype, target: torch.dtype) -> float:
    return 0.0 if source == target else numel * (source.itemsize + target.itemsize)
