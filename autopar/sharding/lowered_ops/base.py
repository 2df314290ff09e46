"""What a communicating lowering is: what it takes, what it sends, and a function on the local shards.

The function is made of plain tensor ops and of messages. A message is a reshard of a small tensor, differentiable like
any other, so autograd derives the backward of the whole. A number that all shards share is a sum of theirs: taken on
as `R` where what follows is the same on all ranks, as `B` where each rank goes on with it for its own shard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from autopar.ir.values import NamedNode
from autopar.mesh import SubMesh
from autopar.rules.shard_call.local_call import FactorSlice, LocalCall
from autopar.sharding.atoms import Atoms
from autopar.sharding.reshard.reshard import Reshard, reshard
from autopar.sharding.sharding import Sharding

Send = Callable[[Tensor], Tensor]


class OpMessage(Protocol):
    """Something that a lowering sends: its steps; `lowering` binds it to a rank."""

    @property
    def reshard(self) -> Reshard: ...
    @property
    def itemsize(self) -> int: ...
    @property
    def differentiable(self) -> bool: ...


@dataclass(frozen=True)
class LoweredOpContext:
    """An op of which some factors are split although its shards need something of each other."""

    lowering: LoweredOp
    node: NamedNode
    mesh: SubMesh
    at: Mapping[str, int]
    """The coordinates of this rank."""
    factors: Mapping[str, tuple[str, ...]]
    """The axes of each of these factors, major to minor."""
    shape: tuple[int, ...]
    """Of this rank's first operand."""
    whole: tuple[int, ...]
    """Of the first operand as a whole."""
    dtype: torch.dtype
    differentiable: bool

    @property
    def axes(self) -> tuple[str, ...]:
        used = {axis for axes in self.factors.values() for axis in axes}
        return tuple(axis for axis in self.mesh if axis in used)

    def messages(self) -> tuple[OpMessage, ...]:
        return self.lowering.messages(self)


class LoweredOp(Protocol):
    def takes(self, node: NamedNode, factor: str) -> bool:
        """Whether it can run this op with this factor split."""

    def allows(self, node: NamedNode, factor: str, atom: int) -> bool:
        """Whether it can run with an atom of the factor cut into pieces; the last ones may be shorter, or empty."""

    def messages(self, split: LoweredOpContext) -> tuple[OpMessage, ...]:
        """What it sends, in order."""

    def run(
        self, split: LoweredOpContext, local: LocalCall, pieces: Mapping[str, FactorSlice], sends: tuple[Send, ...]
    ) -> Any:
        """The op on this rank's shards; `sends` are its messages, bound."""


def dims_of(split: LoweredOpContext) -> dict[str, int]:
    """Where the factors stand in the first operand."""
    operand = split.node.rule.operands[0]
    assert operand is not None, split.node.name
    return {factor: next(i for i, term in enumerate(operand.terms) if factor in term) for factor in split.factors}


def whole_dims(node: NamedNode) -> tuple[int, ...]:
    """Return the dims of the first operand whose factors the rule keeps whole."""
    operand = node.rule.operands[0]
    assert operand is not None, node.name
    return tuple(i for i, term in enumerate(operand.terms) if node.rule.whole.intersection(term))


def largest_of(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    """The largest along a dim, of a shard that may have none."""
    if x.shape[dim]:
        return x.detach().amax(dim, keepdim)
    shape = [size for i, size in enumerate(x.shape) if i != dim]
    none = x.detach().new_full(shape, float("-inf"))
    return none.unsqueeze(dim) if keepdim else none


def widened(dtype: torch.dtype) -> torch.dtype:
    """The type that sums are made in."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


# -- messages ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Total:
    reshard: Reshard
    itemsize: int
    differentiable: bool


def total(split: LoweredOpContext, shape: tuple[int, ...], *, shared: bool) -> OpMessage:
    """A sum over the shards. `shared`: each goes on with it for its own part, so the gradients are summed too."""
    axes = frozenset(split.axes)
    whole = Sharding(((),) * len(shape))
    target = replace(whole, broadcast=axes) if shared else whole
    found = reshard(Atoms.plain(shape), replace(whole, partial=axes), target, split.mesh)
    return Total(found, widened(split.dtype).itemsize, split.differentiable)


@dataclass(frozen=True)
class Maximum:
    reshard: Reshard
    itemsize: int
    differentiable: bool = False


def maximum(split: LoweredOpContext, shape: tuple[int, ...]) -> OpMessage:
    """The largest over the shards, of something without a gradient."""
    summed = total(split, shape, shared=False).reshard
    return Maximum(replace(summed, backward=()), widened(split.dtype).itemsize)
