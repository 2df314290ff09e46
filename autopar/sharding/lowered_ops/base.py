"""Interface of a lowered op: the factors that it takes, its messages, and a function on the local shards.

The function consists of plain tensor ops and messages. A message is a reshard of a small tensor, differentiable like
any other, so autograd derives the backward of the whole. A number for all shards is a sum over them. It is replicated
where all ranks continue with the same values, and broadcast where each rank continues with its own shard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from autopar.ir.values import NamedNode
from autopar.mesh import SubMesh
from autopar.rules.notation import FactorKind
from autopar.rules.shard_call.local_call import FactorSlice, LocalCall
from autopar.sharding.reshard.reshard import Reshard, reshard
from autopar.sharding.sharding import Atoms, Sharding

Send = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class OpMessage:
    """Message of a lowered op, a sum over the shards; package `lowering` binds its reshard to a rank."""

    reshard: Reshard
    itemsize: int
    differentiable: bool

    @property
    def operand(self) -> int:
        """The operand that is sent."""
        return 0

    @property
    def beside(self) -> tuple[float, ...]:
        """Shares of the op's work that run beside each of its hops in turn; empty if the op waits for it."""
        return ()


@dataclass(frozen=True)
class OperandShard:
    """Operand of a lowered op on one rank: local and global shape, dtype, and whether it has a gradient."""

    shape: tuple[int, ...]
    whole: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool


@dataclass(frozen=True)
class LoweredOpContext:
    """Lowered op on one rank: a node, its split factors, and its operands."""

    lowering: LoweredOp
    node: NamedNode
    mesh: SubMesh
    at: Mapping[str, int]  # the coordinates of the rank
    # Axes of each split factor that the rule alone would keep whole, major to minor.
    factors: Mapping[str, tuple[str, ...]]
    # Axes of each split site.
    splits: tuple[tuple[tuple[str, int], tuple[str, ...]], ...]
    # None for an absent one.
    operands: tuple[OperandShard | None, ...]

    @property
    def first(self) -> OperandShard:
        (first, *_) = self.operands
        assert first is not None, self.node.name
        return first

    @property
    def shape(self) -> tuple[int, ...]:
        """Local shape of the first operand."""
        return self.first.shape

    @property
    def whole(self) -> tuple[int, ...]:
        """Global shape of the first operand."""
        return self.first.whole

    @property
    def dtype(self) -> torch.dtype:
        return self.first.dtype

    @property
    def differentiable(self) -> bool:
        return self.first.differentiable

    @property
    def axes(self) -> tuple[str, ...]:
        used = {axis for axes in self.factors.values() for axis in axes}
        return tuple(axis for axis in self.mesh if axis in used)

    def messages(self) -> tuple[OpMessage, ...]:
        return self.lowering.messages(self)


class LoweredOp(Protocol):
    """Op that runs on shards with collectives of its own."""

    def takes(self, node: NamedNode, factor: str) -> bool:
        """Return whether it can run this op with this factor split."""

    def allows(self, node: NamedNode, factor: str, atom: int) -> bool:
        """Return whether an atom of the factor may be split, perhaps with empty pieces."""

    def messages(self, split: LoweredOpContext) -> tuple[OpMessage, ...]:
        """Return its messages, in the order of sending."""

    def run(
        self, split: LoweredOpContext, local: LocalCall, pieces: Mapping[str, FactorSlice], sends: tuple[Any, ...]
    ) -> Any:
        """Run the op on the shards of this rank; `sends` are its messages, bound to the rank: functions or rings."""


class WholeFactorOp:
    """Lowered op over factors that its rule keeps whole, in pieces of any length."""

    # Results that must be unused: the statistics that eager PyTorch returns for its own backward.
    statistics = slice(1, None)

    def takes(self, node: NamedNode, factor: str) -> bool:
        return node.rule.kinds[factor] is FactorKind.WHOLE and not any(node.outputs[self.statistics])

    def allows(self, node: NamedNode, factor: str, atom: int) -> bool:
        return True


def dims_of(split: LoweredOpContext) -> dict[str, int]:
    """Return the dim of the first operand of each split factor."""
    operand = split.node.rule.operands[0]
    assert operand is not None, split.node.name
    return {factor: next(i for i, term in enumerate(operand.terms) if factor in term) for factor in split.factors}


def whole_dims(node: NamedNode) -> tuple[int, ...]:
    """Return the dims of the first operand whose factors the rule keeps whole."""
    operand = node.rule.operands[0]
    assert operand is not None, node.name
    return tuple(i for i, term in enumerate(operand.terms) if node.rule.whole.intersection(term))


def local_maximum(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    """Return the maximum along a dim of a shard, minus infinity where the shard is empty."""
    if x.shape[dim]:
        return x.detach().amax(dim, keepdim)
    shape = [size for i, size in enumerate(x.shape) if i != dim]
    none = x.detach().new_full(shape, float("-inf"))
    return none.unsqueeze(dim) if keepdim else none


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to sum in: float32 for 16-bit floats, which lose digits."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


# -- messages ---------------------------------------------------------------------------------------------------------


class Maximum(OpMessage):
    """Message that takes the maximum instead of the sum."""


class BareSum(OpMessage):
    """Sum without a derivative: an op with a backward of its own sends it in both directions."""


def total(split: LoweredOpContext, shape: tuple[int, ...], *, shared: bool) -> OpMessage:
    """Return the message that sums over shards, with `shared` the gradients too.

    They must be, where each rank continues with the sum for its own shard.
    """
    axes = frozenset(split.axes)
    whole = Sharding(((),) * len(shape))
    target = replace(whole, broadcast=axes) if shared else whole
    found = reshard(Atoms.plain(shape), replace(whole, partial=axes), target, split.mesh)
    return OpMessage(found, sum_dtype(split.dtype).itemsize, split.differentiable)


def bare_total(split: LoweredOpContext, shape: tuple[int, ...]) -> OpMessage:
    """Return the message that sums over shards, called once by the forward and once by the backward of an op."""
    both = total(split, shape, shared=True)
    return BareSum(both.reshard, both.itemsize, both.differentiable)


def maximum(split: LoweredOpContext, shape: tuple[int, ...]) -> OpMessage:
    """Return the message that takes the maximum over the shards, without a gradient."""
    # The steps are those of a sum; only the op of the collective differs.
    summed = total(split, shape, shared=False).reshard
    return Maximum(replace(summed, backward=()), sum_dtype(split.dtype).itemsize, differentiable=False)
