"""Prices of the reshards of a tensor that several ops take: alone, and together with the other ops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.sharding.sharding import Sharding
from autopar.solver import Flags, Floats
from autopar.solver.model.cost_tables import Parts, weigh
from autopar.solver.model.model import Model
from autopar.solver.model.shared_reshards import SharedTensor, allowed_parts, reshard_parts, sum_parts

__all__ = ["SharedPrices", "at_mode"]


@dataclass(frozen=True, eq=False)
class SharedPrices:
    """Prices of one tensor: a row for each of its states, a column for each sharding that several ops take."""

    model: Model
    one: SharedTensor
    wants: tuple[Sharding, ...]
    # For each state: the shardings that are paid for anyway, as the step returns the tensor so.
    returned: Flags

    @cached_property
    def reshards(self) -> Mapping[bool, Parts]:
        """Return the sums of each reshard: recomputed or not; of a parameter, for a later op or the first."""
        made, states = self.model.cost_tables, self.model.variables[self.one.place].states
        is_param = self.one.tensor.kind == "param"
        needed = {True, False} if is_param else {flag for use in self.one.uses for flag in use.again}
        return {
            flag: reshard_parts(made, self.one.tensor, states, self.wants, flag and not is_param, flag)
            for flag in needed.union(self.least, [self.least_of_all])
        }

    @cached_property
    def additions(self) -> Parts:
        """Return by how much more each op pays to add its gradient in a sharding than as the tensor is kept."""
        states = self.model.variables[self.one.place].states
        return sum_parts(self.model.cost_tables, self.one.tensor, states, self.wants)

    @cached_property
    def least(self) -> tuple[bool, ...]:
        """Return for each mode which reshard is the cheapest of those that an op may pay."""
        if self.one.tensor.kind == "param":
            return (True,)
        flags = [use.again for use in self.one.uses]
        if self.one.is_in_layer:
            return tuple(all(at_mode(own, mode) for own in flags) for mode in range(max(map(len, flags))))
        return (all(map(all, flags)),)

    @cached_property
    def least_of_all(self) -> bool:
        return all(self.least)

    def reshard(self, weights: Floats, flag: bool) -> Floats:
        return self._weigh(self.reshards[flag], weights)

    def added(self, weights: Floats) -> Floats:
        return self._weigh(self.additions, weights)

    def alone_and_together(self, weights: Floats, flag: bool) -> tuple[Floats, Floats]:
        """Return what an op need not pay where another one does, and what all that take a sharding pay together.

        Each op pays for its addition; one op alone adds nothing in that sharding.
        """
        added = self.added(weights)
        alone = self.reshard(weights, flag) - added
        return alone, np.where(self.returned, -added, alone)

    def unpaid(self, weights: Floats, flag: bool) -> Floats:
        """Return the price of a reshard that the step does not have anyway."""
        return np.asarray(np.where(self.returned, 0.0, self.reshard(weights, flag)))

    def _weigh(self, parts: Parts, weights: Floats) -> Floats:
        allowed = allowed_parts(parts)
        return weigh(allowed, weights) if allowed else np.zeros(self.returned.shape)


def at_mode(flags: tuple[bool, ...], mode: int) -> bool:
    """Return the flag of a mode; a layer whose mode is not open has one flag."""
    return flags[min(mode, len(flags) - 1)]
