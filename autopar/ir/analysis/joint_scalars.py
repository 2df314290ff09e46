"""Scalars that are summed over ranks in one collective: a loss and the number of its targets, say.

The rewriter lets a sum wait for the next one if nothing uses it until then
(autopar/lowering/passes/join_small_sums.py); what is sent at once counts as one collective. Which sums there are is up
to the plan. That all scalars of a group are summed, or none, is taken for granted here: so each has its share of the
collective, whatever becomes of the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from types import MappingProxyType

from autopar.ir.values import NamedNode, NamedTensor

__all__ = ["shares_of_totals"]


def shares_of_totals(nodes: Sequence[NamedNode], tensors: Mapping[str, NamedTensor]) -> Mapping[str, float]:
    """By scalar, where several are summed at once: what it counts of their collective."""
    first_use: dict[str, int] = {}
    for place, node in enumerate(nodes):
        for name in node.operands:
            first_use.setdefault(name or "", place)
    groups: list[list[str]] = []
    until = -1
    for place, node in enumerate(nodes):
        for name in _scalars(node, tensors):
            used = first_use.get(name, len(nodes))
            if until < place:
                groups.append([])
                until = used
            groups[-1].append(name)
            until = min(until, used)
    return MappingProxyType({name: 1 / len(group) for group in groups if len(group) > 1 for name in group})


def _scalars(node: NamedNode, tensors: Mapping[str, NamedTensor]) -> list[str]:
    """The results of an op that sums all that it reads: partial as soon as any of it is split."""
    read = any(operand is not None and operand.factors for operand in node.rule.operands)
    names = [name for name in node.outputs if name is not None]
    return [name for name in names if read and prod(tensors[name].shape) == 1]
