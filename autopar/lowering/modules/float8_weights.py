"""Weights in float8 that all micro-batches of a pass share: each is scaled and cast once.

A weight does not change while a loop runs its micro-batches. Without compilation the first product with it scales and
casts it, and the others take what that one made. A product by its transpose, as in the backward, needs another order in
memory and is cast once besides. Weights that each micro-batch gathers for itself are cast there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor

__all__ = ["CastWeights", "cast_weight"]

# A tensor in float8, and the inverse of its scale.
Cast = tuple[Tensor, Tensor]


class CastWeights:
    """Weights of one pass over the micro-batches in float8."""

    # The pass that runs. Not one for each thread: autograd runs backwards in threads of its own.
    running: CastWeights | None = None

    def __init__(self) -> None:
        self._added: list[Tensor] = []
        # Addresses of the inputs of the pass.
        self._inputs: set[int] = set()
        self._known: dict[object, Cast] = {}

    def add(self, inputs: Iterable[Tensor]) -> None:
        """Note tensors that keep their values until the pass ends."""
        self._added += inputs

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep weights that are cast meanwhile."""
        before, CastWeights.running = CastWeights.running, self
        try:
            yield
        finally:
            CastWeights.running = before

    def of(self, weight: Tensor, dim: int | None, cast: Callable[[Tensor, int | None], Cast]) -> Cast:
        """Return a weight in float8; `cast` makes it where it is not known."""
        self._inputs.update(x.untyped_storage().data_ptr() for x in self._added)
        self._added.clear()
        memory = weight.untyped_storage().data_ptr()
        if memory not in self._inputs:
            return cast(weight, dim)
        key = memory, weight.storage_offset(), weight.shape, weight.stride(), weight.dtype, dim
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = cast(weight, dim)
        return found


def cast_weight(weight: Tensor, dim: int | None, cast: Callable[[Tensor, int | None], Cast]) -> Cast:
    """Return a weight in float8, scaled as a whole or in slices along a reduced dim, and the inverse of its scale."""
    running = CastWeights.running
    # A compiler fuses the cast with what stands beside it.
    if running is None or type(weight) is not Tensor:
        return cast(weight, dim)
    return running.of(weight, dim, cast)
