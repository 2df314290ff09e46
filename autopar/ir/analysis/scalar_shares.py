"""Shares of scalars in the collectives that add up several at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from types import MappingProxyType

from autopar.ir.values import NamedNode, NamedTensor

__all__ = ["collective_shares"]


def collective_shares(nodes: Sequence[NamedNode], tensors: Mapping[str, NamedTensor]) -> Mapping[str, float]:
    """Return the share of each scalar in the collective that adds up several, such as a loss and its target count.

    The emitter delays a sum until its first use, and joins it with those that follow until then
    (`autopar/lowering/passes/join_small_sums.py`). The plan decides which scalars are sums. The shares assume that all
    of a group are, or none, so that the price of each does not depend on the others.
    """
    first_use: dict[str, int] = {}
    for place, node in enumerate(nodes):
        for name in node.operands:
            first_use.setdefault(name or "", place)
    groups: list[list[str]] = []
    until = -1
    for place, node in enumerate(nodes):
        # An op that reads dims and returns a scalar sums over all of them: partial as soon as one of them is split.
        reads_dims = any(operand is not None and operand.factors for operand in node.rule.operands)
        for name in node.outputs if reads_dims else ():
            if name is None or prod(tensors[name].shape) != 1:
                continue
            used = first_use.get(name, len(nodes))
            if until < place:
                groups.append([])
                until = used
            groups[-1].append(name)
            until = min(until, used)
    return MappingProxyType({name: 1 / len(group) for group in groups if len(group) > 1 for name in group})
