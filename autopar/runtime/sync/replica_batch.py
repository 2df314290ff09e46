"""The rows of a global batch that one replica trains on."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace

from torch import Tensor

from autopar.errors import AutoparError
from autopar.ir.graph import NamedGraph
from autopar.ir.pytree import Flattened
from autopar.sharding.replicas import Drift, batch_places, check_batch

__all__ = ["ReplicaBatch", "ReplicaShares"]

# Gives numbers for `by speed`, from the graph of the whole batch.
ReplicaShares = Callable[[NamedGraph, Drift, str], Drift]


class ReplicaBatch:
    """Cut of global inputs into those of one replica; one trace for each shape of them."""

    def __init__(self, drift: Drift, index: int, dim: str, shares: ReplicaShares | None) -> None:
        self.drift, self.index, self.dim, self.shares = drift, index, dim, shares
        # By call: for each tensor its dim of the batch and the range there, or None.
        self._known: dict[Hashable, tuple[tuple[int, int, int] | None, ...]] = {}

    def cut(self, flat: Flattened, trace: Callable[[], NamedGraph]) -> Flattened:
        """Return the inputs of this replica, views of the global ones."""
        key = tuple((path, tensor.shape) for path, tensor in zip(flat.paths, flat.tensors, strict=True))
        if key not in self._known:
            self._known[key] = self._ranges(flat, trace())
        pairs = zip(flat.tensors, self._known[key], strict=True)
        return replace(flat, tensors=tuple(x if place is None else _narrow(x, place) for x, place in pairs))

    def _ranges(self, flat: Flattened, graph: NamedGraph) -> tuple[tuple[int, int, int] | None, ...]:
        places = batch_places(graph, self.drift, self.dim)
        batch = graph.dims[self.dim].size
        drift = self.drift if self.shares is None else self.shares(graph, self.drift, self.dim)
        check_batch(drift, batch, self.dim)
        for mutation in graph.exported.mutations:
            if mutation.kind == "input" and mutation.target in places:
                raise AutoparError(
                    f"the model changes its input {mutation.target} in place, of which each replica has a part\n"
                    "fix: give each rank its own rows, with local_inputs=True; or change a copy in the model"
                )
        rows = drift.rows(batch)
        first, count = sum(rows[: self.index]), rows[self.index]
        found = []
        for path in flat.paths:
            place = places.get(path)
            found.append(None if place is None else (place[0], first * place[1], count * place[1]))
        return tuple(found)


def _narrow(tensor: Tensor, place: tuple[int, int, int]) -> Tensor:
    return tensor.narrow(*place)
