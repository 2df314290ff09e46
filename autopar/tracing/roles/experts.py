"""`expert`: the leading dim of stacks of matrices that a router chooses from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from autopar.tracing.binding import BoundNode
from autopar.tracing.roles.structure import Proposal, Structure, op_name

__all__ = ["experts"]


def experts(structure: Structure) -> Iterator[Proposal]:
    """The leading dim of a stack of equal matrices, of the extent that a router chooses from."""
    routers: dict[int, list[int]] = defaultdict(list)
    for bound in structure.binding.nodes:
        for factor in structure.born(bound):
            dim = structure.factor_dim(bound, factor)
            if not structure.space.parts(dim):
                routers[structure.space.size(dim)].append(dim)
    for bound in structure.binding.nodes:
        for stack in _stacks(structure, bound):
            chosen = [dim for dim in routers[structure.space.size(stack)] if structure.name(dim) in (None, "expert")]
            if chosen or structure.space.find(stack) in routers[structure.space.size(stack)]:
                yield stack, "expert"
                yield from ((dim, "expert") for dim in chosen)


def _stacks(structure: Structure, bound: BoundNode) -> Iterator[int]:
    """The leading dims of weights of which an op multiplies each matrix by itself."""
    summed = set(structure.contractions(bound))
    if not summed or "conv" in op_name(bound):
        return
    fixed = summed | set(structure.born(bound))
    for operand, key in zip(bound.rule.operands, bound.operands, strict=False):
        if operand is None or key is None or not structure.is_weight(key) or len(operand.terms) < 3:
            continue
        leading = operand.terms[0]
        if len(leading) == 1 and leading[0] not in fixed and summed.intersection(operand.factors):
            yield structure.dims(key)[0]
