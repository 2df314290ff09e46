"""`expert`: the leading dim of stacks of matrices that a router chooses from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from autopar.tracing.naming.bind_graph import BoundNode
from autopar.tracing.naming.roles.structure import Proposal, Structure, op_name
from autopar.tracing.naming.roles.tables import looked_up

__all__ = ["experts"]


def experts(structure: Structure) -> Iterator[Proposal]:
    """The leading dim of a stack of equal matrices, of the extent that a router chooses from."""
    nodes = structure.binding.nodes
    routed = {structure.factor_dim(bound, factor) for bound in nodes for factor in structure.born(bound)}
    yield from _chosen(structure, routed)
    routers: dict[int, list[int]] = defaultdict(list)
    summed = {structure.factor_dim(bound, factor) for bound in nodes for factor in structure.contractions(bound)}
    for bound in nodes:
        for factor in structure.born(bound):
            dim = structure.factor_dim(bound, factor)
            if not any(map(structure.name, structure.space.parts(dim))) and dim not in summed:
                routers[structure.space.size(dim)].append(dim)
    for bound in structure.binding.nodes:
        for stack in _stacks(structure, bound):
            alike = routers[structure.space.size(stack)]
            chosen = [dim for dim in alike if structure.name(dim) == "expert"]
            chosen = chosen or [dim for dim in alike if structure.name(dim) is None]
            if chosen or structure.space.find(stack) in routers[structure.space.size(stack)]:
                yield stack, "expert"
                yield from ((dim, "expert") for dim in chosen)
    yield from _rows(structure)


def _chosen(structure: Structure, routed: set[int]) -> Iterator[Proposal]:
    """Return the dims that a router's layer makes and `topk` chooses from."""
    for bound in structure.binding.nodes:
        if op_name(bound) == "topk":
            whole = (structure.factor_dim(bound, factor) for factor in bound.rule.whole if factor in bound.factors)
            yield from ((dim, "expert") for dim in whole if dim in routed)


def _rows(structure: Structure) -> Iterator[Proposal]:
    """Rows of tables, and matrices of stacks, that are looked up by a choice."""
    extents = {structure.space.size(dim) for dim, name in structure.names.items() if name == "expert"}
    for rows, origin, rank in looked_up(structure):
        if origin == "choice" and (rank > 2 or structure.space.size(rows) in extents):
            yield rows, "expert"


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
