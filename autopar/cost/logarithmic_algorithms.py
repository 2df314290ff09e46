"""Algorithms in rounds between pairs of ranks: halving, doubling, binomial trees, Bruck, PAT, pairwise exchanges.

    p ranks, one level               hops in a row             traffic
    halving, doubling: all-reduce    2 log2 p                  2 (p-1)/p
    recursive doubling: all-reduce   log2 p                    log2 p
    binomial reduce + broadcast      2 floor(log2 p)           2 ceil(log2 p)
    binomial gather, scatter         floor(log2 p)             (p-1)/p
    Bruck, PAT: all-gather           ceil(log2 p)              (p-1)/p
    Bruck: all-to-all                ceil(log2 p)              for each bit, the share of 0 .. p-1 that has it
    pairwise: all-to-all             p-1                       (p-1)/p

Where p is no power of two, halving and recursive doubling fold: each surplus rank first sends all its data to a partner
and gets the result. Binary blocks do not fold: blocks of powers of two halve at the same time, and each smaller block
joins the next larger one.

Sources: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH" (2005);
Rabenseifner, Träff, "More efficient reduction algorithms for non-power-of-two number of processors" (2004); Bruck et
al., "Efficient algorithms for all-to-all communications in multiport message-passing systems" (1997); NCCL 2.23's
release notes for PAT; Hwang et al., "Tutel: adaptive mixture-of-experts at scale" (2023) for exchanges by level.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from math import floor, log2

from autopar.cost.collective_algorithms import (
    CollectiveAlgorithm,
    Group,
    Phase,
    one_level,
    ranks_of,
    ring,
    rounds_of,
)


def _blocks(units: int) -> list[int]:
    """Return the powers of two that add up to a number, the largest first."""
    return [1 << bit for bit in reversed(range(units.bit_length())) if units >> bit & 1]


# -- halving and doubling ----------------------------------------------------------------------------------------------


def halving_doubling(kind: str, group: Group) -> CollectiveAlgorithm | None:
    """Halve over the fast links first, so that slow links carry little, then double in reverse order."""
    directions = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}.get(kind)
    if directions is None:
        return _halving_to_root(kind, group)
    phases = []
    for i, span in enumerate(group):
        power = _blocks(span.units)[0]
        folded = power < span.units
        if folded and kind == "reduce_scatter" and len(group) == 1:
            chain = _folded_hops(span.units, near_first=False)
            return (one_level(group, 0, chain, _folded_halving(span.units)),)
        if folded and kind != "all_reduce":
            return None
        hops, traffic = directions * log2(power), directions * (power - 1) / power
        phases.append(one_level(group, i, hops + 2 * folded, traffic + 2 * folded))
    return tuple(phases)


@lru_cache(maxsize=1024)
def _folded_hops(units: int, near_first: bool) -> int:
    """Return the longest chain of messages through the fold, one exchange in each round, and the way back.

    It is shorter than the sum of the rounds where few ranks fold: who gets the data of the last fold sends none back.
    """
    power = _blocks(units)[0]
    times = [int(j < units - power) for j in range(power)]
    distances = [1 << bit for bit in range(power.bit_length() - 1)]
    for distance in distances if near_first else reversed(distances):
        times = [max(times[j], times[j ^ distance] + 1) for j in range(power)]
    return max([*times, *(time + 1 for time in times[: units - power])])


def _folded_halving(units: int) -> float:
    """Return the traffic of a reduce-scatter in which surplus ranks fold: their partners halve for two."""
    power = _blocks(units)[0]
    surplus = units - power
    parts = (1 << bit for bit in range(power.bit_length() - 1))
    return 1 + sum(part + min(surplus, part) for part in parts) / units + 1 / units


def _halving_to_root(kind: str, group: Group) -> CollectiveAlgorithm | None:
    """Return a reduce that halves and gathers in a binomial tree, or a broadcast that scatters and doubles."""
    if kind not in ("reduce", "broadcast") or len(group) > 1:
        return None
    power = _blocks(group[0].units)[0]
    folded = power < group[0].units
    if folded and kind == "broadcast":
        return None
    return (one_level(group, 0, 2 * log2(power) + folded, 2 * (power - 1) / power + folded),)


def recursive_doubling(kind: str, group: Group) -> CollectiveAlgorithm | None:
    """Exchange all data with a partner in each round, the nearest first."""
    if kind not in ("all_reduce", "all_gather"):
        return None
    p = ranks_of(group)
    phases = []
    for i, span in enumerate(group):
        power = _blocks(span.units)[0]
        folded = power < span.units
        if kind == "all_gather":
            if folded:
                return None
            # Each rank of a unit sends what all of them have.
            phases.append(one_level(group, i, log2(power), span.members**2 * (span.units - 1) / p))
        else:
            hops = _folded_hops(span.units, near_first=True)
            phases.append(one_level(group, i, hops, span.members * (log2(power) + 2 * folded)))
    return tuple(phases)


def binary_blocks(kind: str, group: Group) -> CollectiveAlgorithm | None:
    """Halve and double in blocks of powers of two; each smaller block joins the next larger one."""
    if kind != "all_reduce":
        return None
    return tuple(
        one_level(group, i, 2 * log2(_blocks(span.units)[0]), _block_traffic(span.units))
        for i, span in enumerate(group)
    )


@lru_cache(maxsize=1024)
def _block_traffic(units: int) -> float:
    """Return the time of the longest chain of messages over binary blocks, for links of one byte per second.

    Blocks halve and double at the same time, so the sends of different ranks do not add up.
    """
    blocks = _blocks(units)
    # When each rank of each block has the sum over its own and all smaller blocks, the smallest block first.
    ready = [[(blocks[-1] - 1) / blocks[-1]] * blocks[-1]]
    for large in reversed(blocks[:-1]):
        small_block, ratio = ready[-1], large // len(ready[-1])
        own = (large - 1) / large
        ready.append([max(own, small_block[j // ratio] + (j % ratio + 1) / large) for j in range(large)])
    # Way down: each rank sends its piece to the next smaller block, and then doubles.
    times, last = ready[-1], 0.0
    for block, small in zip(blocks, (*blocks[1:], 0), strict=True):
        below = list[float]()
        if small:
            times = [time + 1 / block for time in times]
            ratio = block // small
            below = [_received(times[j * ratio : (j + 1) * ratio], 1 / block) for j in range(small)]
        distance = 1
        while distance < block:
            times = [max(times[j], times[j ^ distance]) + distance / block for j in range(block)]
            distance *= 2
        last, times = max([last, *times]), below
    return last


def _received(arrivals: Iterable[float], each: float) -> float:
    """Return the end of messages that come in one after the other; each could end at its own time."""
    end = 0.0
    for arrival in sorted(arrivals):
        end = max(end + each, arrival)
    return end


# -- trees -------------------------------------------------------------------------------------------------------------


def binomial(kind: str, group: Group) -> CollectiveAlgorithm | None:
    """Double the ranks that have the data in each round, or halve them; no pieces, so each message is whole."""
    if kind == "all_reduce":
        down = _whole_messages(group)
        return (*reversed(down), *down)
    if kind in ("broadcast", "reduce"):
        return _whole_messages(group)
    if kind not in ("gather", "scatter"):
        return None
    # The leader of a unit passes on the parts of all its ranks.
    p = ranks_of(group)
    return tuple(
        one_level(group, i, floor(log2(span.units)), span.members * (span.units - 1) / p, lone=i > 0)
        for i, span in enumerate(group)
    )


def _whole_messages(group: Group) -> CollectiveAlgorithm:
    # The root sends a message in each round. The chain of most hops needs a full subtree.
    return tuple(
        one_level(group, i, floor(log2(span.units)), float(rounds_of(span.units)), lone=i > 0)
        for i, span in reversed(list(enumerate(group)))
    )


def scatter_ring(kind: str, group: Group) -> CollectiveAlgorithm | None:
    """Return a broadcast that scatters in a binomial tree and gathers in a ring."""
    scattered, gathered = binomial("scatter", group), ring("all_gather", group)
    return (*scattered, *gathered) if kind == "broadcast" and scattered and gathered else None


def ring_gather(kind: str, group: Group) -> CollectiveAlgorithm | None:
    """Return a reduce that reduce-scatters in a ring, after which the root receives every part."""
    if kind != "reduce":
        return None
    p = ranks_of(group)
    reduced = ring("reduce_scatter", group) or ()
    traffic = tuple((p - span.members) / p for span in group)
    hops = tuple(float(i == len(group) - 1) for i in range(len(group)))
    return (*reduced, Phase(hops, traffic, lone=True))


# -- shifts: each rank sends to the rank at a distance -----------------------------------------------------------------


def _shifts(group: Group, rounds: Iterable[tuple[int, float]]) -> CollectiveAlgorithm:
    """Return the phases of rounds, each given by its distance and the bytes that a rank sends."""
    p, rounds = ranks_of(group), list(rounds)
    found: Counter[tuple[float, ...]] = Counter()
    for distance, size in rounds:
        # Ranks of a unit whose message leaves it: those at its end, and no more than all of them. The ranks are in a
        # circle, so that a long way forward is a short way back.
        far = min(distance, p - distance)
        traffic = []
        for i, span in enumerate(group):
            leaves_all = i < len(group) - 1 and far >= group[i + 1].members
            # One rank alone has its own links only.
            sending = max(min(far, span.members), span.rate / span.lone_rate)
            traffic.append(0.0 if leaves_all else size * sending)
        found[tuple(traffic)] += 1
    none = tuple(0.0 for _ in group)
    hops = Phase(_longest_chain(group, [distance for distance, _ in rounds]), none)
    return (hops, *(Phase(none, tuple(count * share for share in traffic)) for traffic, count in found.items()))


# More than the rounds of any shift: hops on one level outweigh any number of them on the level below.
_HOP_WEIGHT = 1 << 15


def _longest_chain(group: Group, distances: Iterable[int]) -> tuple[float, ...]:
    """Return the hops of the slowest chain of messages, one or none in each round, by level."""
    import numpy as np  # late: the help of the command line reads clusters and needs no numpy

    ranks = np.arange(ranks_of(group))
    waited = np.zeros(len(ranks), np.int64)
    for distance in distances:
        sources = (ranks - distance) % len(ranks)
        weight = np.zeros(len(ranks), np.int64)
        for i, span in enumerate(group):
            weight[sources // span.members != ranks // span.members] = _HOP_WEIGHT**i
        waited = np.maximum(waited, waited[sources] + weight)
    longest = int(waited.max())
    return tuple(float(longest // _HOP_WEIGHT**i % _HOP_WEIGHT) for i in range(len(group)))


def bruck(kind: str, group: Group) -> CollectiveAlgorithm | None:
    """Send to the rank at distance 1, 2, 4, ... everything that it lacks, in few messages."""
    p = ranks_of(group)
    distances = [1 << bit for bit in range(rounds_of(p))]
    if kind == "all_gather":
        return _shifts(group, ((distance, min(distance, p - distance) / p) for distance in distances))
    if kind == "all_to_all":
        return _shifts(group, ((distance, sum(1 for j in range(p) if j & distance) / p) for distance in distances))
    return None


def pat(kind: str, group: Group) -> CollectiveAlgorithm | None:
    """Return NCCL's trees with parallel aggregation, of one rank per node: far ranks first, while there is little."""
    if kind not in ("all_gather", "reduce_scatter") or group[0].innermost:
        return None
    p = ranks_of(group)
    if len(group) == 1:
        return (one_level(group, 0, rounds_of(p), (p - 1) / p),)
    # A rank holds a piece of each rank at a multiple of twice the distance, and sends those that end inside the group.
    distances = [1 << bit for bit in reversed(range(rounds_of(p)))]
    return _shifts(group, ((distance, ((p - 1 - distance) // (2 * distance) + 1) / p) for distance in distances))


def pairwise(kind: str, group: Group) -> CollectiveAlgorithm | None:
    """Exchange one part with one rank in each round, at distance 1, 2, 3, ... or by the bits of its number."""
    if kind not in ("all_to_all", "reduce_scatter"):
        return None
    p = ranks_of(group)
    if kind == "reduce_scatter" or p & (p - 1):
        return _shifts(group, ((distance, 1 / p) for distance in range(1, p)))
    # Partners differ in some bits of their number: all ranks of a unit leave it in the same rounds.
    return tuple(
        one_level(group, i, span.members * (span.units - 1), span.members**2 * (span.units - 1) / p)
        for i, span in enumerate(group)
    )


def hierarchical_all_to_all(kind: str, group: Group) -> CollectiveAlgorithm | None:
    """Exchange inside units what is for ranks at the same place, then between units: few, longer messages."""
    if kind != "all_to_all" or len(group) < 2:
        return None
    return tuple(
        one_level(group, i, span.units - 1, span.members * (span.units - 1) / span.units)
        for i, span in enumerate(group)
    )
