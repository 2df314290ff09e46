"""What an algorithm does on a hierarchy of links: how many hops it takes in a row, and what passes each level.

A group of ranks is seen as a tuple of spans, the innermost links first: `units` of the level below are joined over
`level`. A buffer of 1 byte is reduced, gathered, exchanged; `traffic` is what the busiest unit of each level then sends
or receives in one direction (whichever is more), and `hops` the messages that must follow one another. What passes two
levels at a time is pipelined, so the slower level counts; phases of their own add up.

    p ranks, one level      hops in a row           traffic
    ring all-reduce         2 (p-1)                 2 (p-1)/p
    ring all-gather         p-1                     (p-1)/p
    double binary tree      2 ceil(log2 p)          2, but 1 for p = 2
    halving and doubling    2 log2 p                2 (p-1)/p, p a power of two
    NVLS all-reduce         2                       1 + 1/p: every rank's part is read by all, its own result written

Sources: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH" (2005); Sanders,
Speck, Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan" (2009); Jia et al., "Highly
scalable deep learning training system with mixed-precision" (2018); Mikami et al., "Massively distributed SGD:
ImageNet/ResNet-50 training in a flash" (2018); NCCL's documentation for NVLS and SHARP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil, log2, prod
from types import MappingProxyType

from autopar.cost.hardware.topology import TopologyLevel

__all__ = ["ALGORITHMS", "KINDS", "CollectiveAlgorithm", "LevelSpan", "Phase"]

KINDS = (
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all"),
    *("broadcast", "reduce", "gather", "scatter", "send", "halo_exchange"),
)


@dataclass(frozen=True)
class LevelSpan:
    """What a group of ranks spans of one level."""

    level: TopologyLevel
    units: int
    """Units of the level below that the group joins here; at least 2."""
    members: int
    """The group's ranks in one of these units."""
    rate: float
    """What one of these units sends for the group, in bytes per second; other groups have their share."""
    lone_rate: float
    """The same where one rank of each unit speaks for all."""
    innermost: bool = True
    """Whether its units are single devices by the cluster's topology, and not nodes."""


Group = tuple[LevelSpan, ...]


@dataclass(frozen=True)
class Phase:
    """Hops in a row and traffic by level, for a buffer of 1 byte; `lone` where leaders alone use the outer links."""

    hops: tuple[float, ...]
    traffic: tuple[float, ...]
    lone: bool = False


CollectiveAlgorithm = tuple[Phase, ...]
"""Phases, one after the other."""

Algorithm = Callable[[str, Group], CollectiveAlgorithm | None]


def _ranks(group: Group) -> int:
    return prod(span.units for span in group)


def _log(units: int) -> int:
    return ceil(log2(units))


# -- algorithms -------------------------------------------------------------------------------------------------------


def _ring(kind: str, group: Group) -> CollectiveAlgorithm | None:
    """One ring through all ranks, which enters and leaves each unit once."""
    p = _ranks(group)
    # The edges of the ring by level: inside units they are chains; the outermost level closes the ring.
    edges = [(span.units - 1) * _ranks(group[i + 1 :]) for i, span in enumerate(group)]
    edges[-1] += 1
    laps, share = {
        "all_reduce": (2 * (p - 1) / p, 2 * (p - 1) / p),
        "all_gather": ((p - 1) / p, (p - 1) / p),
        "reduce_scatter": ((p - 1) / p, (p - 1) / p),
        "broadcast": ((p - 1) / p, 1.0),
        "reduce": ((p - 1) / p, 1.0),
    }.get(kind, (0.0, 0.0))
    if not laps:
        return None
    return (Phase(tuple(laps * count for count in edges), tuple(share for _ in group)),)


def _tree_traffic(units: int) -> float:
    """Of an all-reduce over two trees, each of half the data: a unit inside one tree is a leaf of the other.

    Up and down the busiest unit sends 2 (a link to a parent and to two children); of three units 1.5, of two 1.
    """
    return min(2.0, units / 2)


def _tree(kind: str, group: Group, depth: Callable[[int], int]) -> CollectiveAlgorithm | None:
    *inner, outer = group
    hops = (*(float(depth(span.units)) for span in inner), float(_log(outer.units)))
    if kind == "all_reduce":
        # Inside, where the trees are chains, both trees pass every rank but the ends: up, then down.
        traffic = (*(min(2.0, float(span.units - 1)) for span in inner), _tree_traffic(outer.units))
        return (Phase(tuple(2 * count for count in hops), traffic),)
    if kind in ("broadcast", "reduce"):
        return (Phase(hops, tuple(1.0 for _ in group)),)
    return None


def _double_binary_tree(kind: str, group: Group) -> CollectiveAlgorithm | None:
    return _tree(kind, group, _log)


def _tree_of_chains(kind: str, group: Group) -> CollectiveAlgorithm | None:
    """As NCCL has it: a double binary tree over nodes, whose ranks are chains; on one node a chain."""
    if len(group) == 1 and group[0].innermost:
        span = group[0]
        hops = float(span.units - 1)
        if kind == "all_reduce":
            return (Phase((2 * hops,), (min(2.0, hops),)),)
        return (Phase((hops,), (1.0,)),) if kind in ("broadcast", "reduce") else None
    return _tree(kind, group, lambda units: units - 1)


def _exchange_of_chains(kind: str, group: Group) -> CollectiveAlgorithm | None:
    """The tree of chains over two nodes: each sends the other what it has, and none is inside a tree."""
    return _tree_of_chains(kind, group) if not group[-1].innermost and group[-1].units == 2 else None


def _blocks(units: int) -> list[int]:
    """The powers of two that make up a number, the largest first."""
    return [1 << bit for bit in reversed(range(units.bit_length())) if units >> bit & 1]


def _one_level(group: Group, i: int, hops: float, traffic: float, lone: bool = False) -> Phase:
    """A phase on one level only."""
    zeros = [0.0] * len(group)
    return Phase((*zeros[:i], hops, *zeros[i + 1 :]), (*zeros[:i], traffic, *zeros[i + 1 :]), lone)


def _halving_doubling(kind: str, group: Group) -> CollectiveAlgorithm | None:
    """Halves over the fast links first, so that little is left for the slow ones; then doubles on the way back.

    Where the units are no power of two, those too many first give all they have to a partner, and take the result.
    """
    ways = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}.get(kind)
    if ways is None:
        return None
    phases = []
    for i, span in enumerate(group):
        power = _blocks(span.units)[0]
        folded = power < span.units
        if folded and kind != "all_reduce":
            return None
        hops, traffic = ways * log2(power), ways * (power - 1) / power
        phases.append(_one_level(group, i, hops + 2 * folded, traffic + 2 * folded))
    return tuple(phases)


def _binary_blocks(kind: str, group: Group) -> CollectiveAlgorithm | None:
    """Halving and doubling in blocks of powers of two; each smaller block joins the next larger one."""
    if kind != "all_reduce":
        return None
    phases = []
    for i, span in enumerate(group):
        first, *others = _blocks(span.units)
        hops = 2 * log2(first) + 2 * len(others)
        traffic = 2 * (first - 1) / first + sum(2 / block for block in others)
        phases.append(_one_level(group, i, hops, traffic))
    return tuple(phases)


def _hierarchical_ring(kind: str, group: Group) -> CollectiveAlgorithm | None:
    """Three phases: reduce to a leader in each unit, a ring of the leaders, broadcast in each unit."""
    if kind != "all_reduce" or len(group) < 2:
        return None
    *inner, outer = range(len(group))
    n = group[outer].units
    inside = [_one_level(group, i, group[i].units - 1, 1.0, lone=i > 0) for i in inner]
    return (*inside, _one_level(group, outer, 2 * (n - 1), 2 * (n - 1) / n, lone=True), *reversed(inside))


def _torus(kind: str, group: Group) -> CollectiveAlgorithm | None:
    """Level by level: scatter inside, reduce what each rank then holds across, gather inside."""
    if len(group) < 2:
        return None
    half = [_one_level(group, i, span.units - 1, (span.units - 1) / span.units) for i, span in enumerate(group)]
    if kind == "all_reduce":
        return (*half, *reversed(half))
    if kind == "all_gather":
        return tuple(reversed(half))
    return tuple(half) if kind == "reduce_scatter" else None


def _nvls(kind: str, group: Group) -> CollectiveAlgorithm | None:
    """The switch adds and multicasts: each rank reads its part of the sum, reading all once, and writes it to all."""
    if len(group) != 1:
        return None
    p = group[0].units
    traffic = {"all_reduce": 1 + 1 / p, "all_gather": 1.0, "reduce_scatter": 1.0}.get(kind)
    return None if traffic is None else (Phase((1.0,), (traffic,)),)


def _nvls_outer(
    kind: str, group: Group, hops: Callable[[int], float], traffic: Callable[[int], float]
) -> CollectiveAlgorithm | None:
    if len(group) < 2 or kind != "all_reduce":
        return None
    inner, *outer = group
    return (
        Phase(
            (1.0, *(hops(span.units) for span in outer)),
            (1 + 1 / inner.units, *(traffic(span.units) for span in outer)),
        ),
    )


def _nvls_tree(kind: str, group: Group) -> CollectiveAlgorithm | None:
    """NVLS inside, a double binary tree across."""
    return _nvls_outer(kind, group, lambda units: 2.0 * _log(units), _tree_traffic)


def _nvls_exchange(kind: str, group: Group) -> CollectiveAlgorithm | None:
    """NVLS inside; two nodes, each of which sends the other what it has."""
    return _nvls_tree(kind, group) if group[-1].units == 2 else None


def _sharp(kind: str, group: Group) -> CollectiveAlgorithm | None:
    """NVLS inside, reduction in the switches of the network: all goes up once and comes down once."""
    return _nvls_outer(kind, group, lambda units: 2.0, lambda units: 1.0)


def _direct(kind: str, group: Group) -> CollectiveAlgorithm | None:
    """All messages at once, each straight to its receiver."""
    p = _ranks(group)
    if kind == "all_to_all":
        traffic = tuple(span.members * (p - span.members) / p for span in group)
    elif kind in ("gather", "scatter"):
        traffic = tuple((p - span.members) / p for span in group)  # of the root's unit
    elif kind in ("send", "halo_exchange"):
        traffic = tuple(1.0 for _ in group)  # neighbours in a line: one rank of a unit sends beyond it
    else:
        return None
    hops = tuple(float(i == len(group) - 1) for i in range(len(group)))
    return (Phase(hops, traffic, lone=kind != "all_to_all"),)


ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType(
    {
        "ring": _ring,
        "double_binary_tree": _double_binary_tree,
        "tree_of_chains": _tree_of_chains,
        "exchange_of_chains": _exchange_of_chains,
        "halving_doubling": _halving_doubling,
        "binary_blocks": _binary_blocks,
        "hierarchical_ring": _hierarchical_ring,
        "torus": _torus,
        "nvls": _nvls,
        "nvls_tree": _nvls_tree,
        "nvls_exchange": _nvls_exchange,
        "sharp": _sharp,
        "direct": _direct,
    }
)
