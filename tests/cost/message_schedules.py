"""Schedules of collectives, message by message, for a buffer of `size` bytes; written without the cost model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from tests.cost.message_simulator import Message, Place, receive, send

Steps = list[list[Message]]
Schedule = dict[Place, Steps]


def joined(*parts: Mapping[Place, Steps]) -> Schedule:
    """Return one schedule after the other; each rank goes on as soon as its own part is done."""
    found: Schedule = defaultdict(list)
    for part in parts:
        for place, steps in part.items():
            found[place] += steps
    return found


def exchange(pairs: Iterable[tuple[int, int, float]], tag: str) -> Schedule:
    """Return one round: each rank posts its sends and receives together."""
    found: dict[Place, list[Message]] = defaultdict(list)
    for number, (source, target, size) in enumerate(pairs):
        found[source].append(send(target, size, f"{tag}.{number}"))
        found[target].append(receive(source, f"{tag}.{number}"))
    return {place: [messages] for place, messages in found.items()}


def rounds(found: Iterable[Iterable[tuple[int, int, float]]], tag: str) -> Schedule:
    return joined(*(exchange(pairs, f"{tag}{number}") for number, pairs in enumerate(found)))


def one_way(source: int, target: int, size: float, tag: str) -> Schedule:
    return exchange([(source, target, size)], tag)


# -- rings and chains --------------------------------------------------------------------------------------------------


def half_ring(ranks: Sequence[int], size: float, tag: str = "ring") -> Schedule:
    """An all-gather or a reduce-scatter."""
    p = len(ranks)
    return rounds(([(ranks[j], ranks[(j + 1) % p], size / p) for j in range(p)] for _ in range(p - 1)), tag)


def ring(ranks: Sequence[int], size: float, tag: str = "ring") -> Schedule:
    return joined(half_ring(ranks, size, f"{tag} scatter"), half_ring(ranks, size, f"{tag} gather"))


def chain(ranks: Sequence[int], size: float, pieces: int, tag: str) -> Schedule:
    """Send pieces from the first to the last rank; each sends one on while the next one comes."""
    found: Schedule = {rank: [] for rank in ranks}
    for j, rank in enumerate(ranks):
        last = j == len(ranks) - 1
        for piece in range(pieces + (j > 0)):
            step = []
            if j and piece < pieces:
                step.append(receive(ranks[j - 1], f"{tag}{piece}"))
            sent = piece - (j > 0)
            if not last and sent >= 0:
                step.append(send(ranks[j + 1], size / pieces, f"{tag}{sent}"))
            found[rank].append(step)
    return {rank: [step for step in steps if step] for rank, steps in found.items()}


def chains_up_and_down(ranks: Sequence[int], size: float, pieces: int) -> Schedule:
    return joined(chain(ranks[::-1], size, pieces, "up"), chain(ranks, size, pieces, "down"))


def double_tree(p: int, size: float, pieces: int) -> Schedule:
    """Two binary trees with half of the data each; what is inside the one is a leaf of the other. Threads per tree."""
    parts: Schedule = defaultdict(list)
    for tree in ("a", "b"):
        parents = {}
        for node in range(1, p):
            low = node & -node
            parent = (node - low) | (2 * low)
            ends = (node, parent if parent < p else node - low)
            if tree == "b":
                ends = tuple(p - 1 - end if p % 2 == 0 else (end - 1) % p for end in ends)  # type: ignore[assignment]
            parents[ends[0]] = ends[1]
        children: dict[int, list[int]] = defaultdict(list)
        for node, parent in parents.items():
            children[parent].append(node)
        for piece in range(pieces):
            for rank in range(p):
                _tree_piece(parts, rank, parents, children[rank], size / 2 / pieces, f"{tree}{piece}")
    return parts


def _tree_piece(
    parts: Schedule, rank: int, parents: Mapping[int, int], children: Sequence[int], size: float, tag: str
) -> None:
    up, down = (rank, f"up {tag[0]}"), (rank, f"down {tag[0]}")
    if children:
        parts[up].append([receive((child, up[1]), f"{tag} up {child}") for child in children])
    to_children = [send((child, down[1]), size, f"{tag} down {child}") for child in children]
    if rank not in parents:
        parts[up].append(to_children)
        return
    parts[up].append([send((parents[rank], up[1]), size, f"{tag} up {rank}")])
    root_sends = parents[rank] not in parents
    source = (parents[rank], up[1] if root_sends else down[1])
    parts[down].append([receive(source, f"{tag} down {rank}")])
    if to_children:
        parts[down].append(to_children)


# -- halving and doubling ----------------------------------------------------------------------------------------------


def _powers(p: int) -> list[int]:
    return [1 << bit for bit in reversed(range(p.bit_length())) if p >> bit & 1]


def _folded(ranks: Sequence[int], size: float, tag: str) -> tuple[Schedule, list[int], Schedule]:
    """Return the fold of surplus ranks, the ranks that go on, and the way back."""
    power = _powers(len(ranks))[0]
    surplus = len(ranks) - power
    pairs = [(ranks[2 * j], ranks[2 * j + 1]) for j in range(surplus)]
    active = [one for _, one in pairs] + list(ranks[2 * surplus :])
    fold = joined(*(one_way(gone, stays, size, f"{tag} fold") for gone, stays in pairs))
    back = joined(*(one_way(stays, gone, size, f"{tag} back") for gone, stays in pairs))
    return fold, active, back


def halving(ranks: Sequence[int], size: float, tag: str, near_first: bool = False) -> Schedule:
    p = len(ranks)
    distances = [p >> number for number in range(1, p.bit_length())]
    distances = distances[::-1] if near_first else distances
    return rounds(
        (
            [(ranks[j], ranks[j ^ distance], size / 2 ** (number + 1)) for j in range(p)]
            for number, distance in enumerate(distances)
        ),
        f"{tag} halve",
    )


def doubling(ranks: Sequence[int], size: float, tag: str, near_first: bool = True) -> Schedule:
    p = len(ranks)
    distances = [1 << number for number in range(p.bit_length() - 1)]
    distances = distances if near_first else distances[::-1]
    return rounds(
        (
            [(ranks[j], ranks[j ^ distance], size / p * 2**number) for j in range(p)]
            for number, distance in enumerate(distances)
        ),
        f"{tag} double",
    )


def halving_doubling(ranks: Sequence[int], size: float, near_first: bool = False) -> Schedule:
    fold, active, back = _folded(ranks, size, "hd")
    return joined(
        fold, halving(active, size, "hd", near_first), doubling(active, size, "hd", near_first=not near_first), back
    )


def halving_in_uneven_parts(ranks: Sequence[int], size: float) -> Schedule:
    """A reduce-scatter of any number of ranks: the partner of a surplus rank halves for two."""
    p = len(ranks)
    fold, active, _ = _folded(ranks, size, "rs")
    surplus = p - len(active)
    parts = [2 if j < surplus else 1 for j in range(len(active))]

    def group(j: int, distance: int) -> float:
        start = j // distance * distance
        return size / p * sum(parts[start : start + distance])

    found = [fold]
    distance = len(active) // 2
    while distance:
        pairs = [(active[j], active[j ^ distance], group(j ^ distance, distance)) for j in range(len(active))]
        found.append(exchange(pairs, f"rs{distance}"))
        distance //= 2
    return joined(*found, *(one_way(ranks[2 * j + 1], ranks[2 * j], size / p, "last") for j in range(surplus)))


def recursive_doubling(ranks: Sequence[int], size: float) -> Schedule:
    fold, active, back = _folded(ranks, size, "rd")
    distances = [1 << number for number in range(len(active).bit_length() - 1)]
    whole = ([(active[j], active[j ^ d], size) for j in range(len(active))] for d in distances)
    return joined(fold, rounds(whole, "rd"), back)


def binary_blocks(ranks: Sequence[int], size: float) -> Schedule:
    blocks, at = [], 0
    for block in _powers(len(ranks)):
        blocks.append(list(ranks[at : at + block]))
        at += block
    found = [halving(block, size, f"block {n}") for n, block in enumerate(blocks)]
    steps = [(n, blocks[n], blocks[n - 1]) for n in range(1, len(blocks))]
    for n, small, large in reversed(steps):
        found.append(_between_blocks(small, large, size / len(large), f"up {n}", up=True))
    for n, small, large in steps:
        found.append(_between_blocks(small, large, size / len(large), f"down {n}", up=False))
    return joined(*found, *(doubling(block, size, f"block {n}") for n, block in enumerate(blocks)))


def _between_blocks(small: Sequence[int], large: Sequence[int], size: float, tag: str, up: bool) -> Schedule:
    ratio = len(large) // len(small)
    pairs = [(one, large[j * ratio + q]) for j, one in enumerate(small) for q in range(ratio)]
    return exchange([(*(pair if up else pair[::-1]), size) for pair in pairs], tag)


# -- trees -------------------------------------------------------------------------------------------------------------


def _binomial_edges(p: int) -> list[list[tuple[int, int, int]]]:
    """Return by round, from the root: parent, child, and how many places the child's subtree has."""
    distance = 1 << (p - 1).bit_length() - 1
    found = []
    while distance:
        parents = range(0, p - distance, 2 * distance)
        found.append([(one, one + distance, min(distance, p - one - distance)) for one in parents])
        distance //= 2
    return found


def broadcast_tree(ranks: Sequence[int], size: float, tag: str = "b") -> Schedule:
    edges = _binomial_edges(len(ranks))
    return joined(*(one_way(ranks[a], ranks[b], size, f"{tag}{n}") for n, each in enumerate(edges) for a, b, _ in each))


def reduce_tree(ranks: Sequence[int], size: float, tag: str = "r") -> Schedule:
    edges = _binomial_edges(len(ranks))[::-1]
    return joined(*(one_way(ranks[b], ranks[a], size, f"{tag}{n}") for n, each in enumerate(edges) for a, b, _ in each))


def scatter_tree(ranks: Sequence[int], size: float, tag: str = "s") -> Schedule:
    edges, p = _binomial_edges(len(ranks)), len(ranks)
    return joined(
        *(one_way(ranks[a], ranks[b], size * k / p, f"{tag}{n}") for n, each in enumerate(edges) for a, b, k in each)
    )


def gather_tree(ranks: Sequence[int], size: float, tag: str = "g") -> Schedule:
    edges, p = _binomial_edges(len(ranks))[::-1], len(ranks)
    return joined(
        *(one_way(ranks[b], ranks[a], size * k / p, f"{tag}{n}") for n, each in enumerate(edges) for a, b, k in each)
    )


def direct_gather(ranks: Sequence[int], size: float) -> Schedule:
    return exchange([(one, ranks[0], size / len(ranks)) for one in ranks[1:]], "gather")


def direct_scatter(ranks: Sequence[int], size: float) -> Schedule:
    return exchange([(ranks[0], one, size / len(ranks)) for one in ranks[1:]], "scatter")


# -- shifts ------------------------------------------------------------------------------------------------------------


def shifted(ranks: Sequence[int], sizes: Iterable[tuple[int, float]], tag: str = "shift") -> Schedule:
    p = len(ranks)
    each = ([(ranks[j], ranks[(j + distance) % p], size) for j in range(p)] for distance, size in sizes)
    return rounds(each, tag)


def bruck_all_gather(ranks: Sequence[int], size: float) -> Schedule:
    """Each rank holds a growing run of blocks, and sends those that the other lacks."""
    p, held, sizes = len(ranks), 1, list[tuple[int, float]]()
    while held < p:
        more = min(held, p - held)
        sizes.append((held, size * more / p))
        held += more
    return shifted(ranks, sizes)


def pat_all_gather(ranks: Sequence[int], size: float) -> Schedule:
    """Far ranks first: each rank sends all blocks that it holds whose next place is still inside the group."""
    p, held, sizes = len(ranks), {0}, list[tuple[int, float]]()
    distance = 1 << (p - 1).bit_length() - 1
    while distance:
        more = {place + distance for place in held if place + distance < p}
        sizes.append((distance, size * len(more) / p))
        held |= more
        distance //= 2
    assert held == set(range(p))
    return shifted(ranks, sizes)


def bruck_all_to_all(ranks: Sequence[int], size: float) -> Schedule:
    """Each block goes as many places as its number says, one binary digit in each round."""
    p = len(ranks)
    moved = {1 << bit: [j for j in range(p) if j >> bit & 1] for bit in range((p - 1).bit_length())}
    assert all(sum(d for d, blocks in moved.items() if j in blocks) == j for j in range(p))
    return shifted(ranks, [(distance, size * len(blocks) / p) for distance, blocks in moved.items()])


def pairwise(ranks: Sequence[int], size: float, tag: str = "pairs") -> Schedule:
    p = len(ranks)
    if p & (p - 1):
        return shifted(ranks, [(distance, size / p) for distance in range(1, p)], tag)
    return rounds(([(ranks[j], ranks[j ^ bits], size / p) for j in range(p)] for bits in range(1, p)), tag)


def pairwise_shifts(ranks: Sequence[int], size: float) -> Schedule:
    return shifted(ranks, [(distance, size / len(ranks)) for distance in range(1, len(ranks))])


def direct_all_to_all(ranks: Sequence[int], size: float) -> Schedule:
    p = len(ranks)
    # In turns, so that no receiver is asked by all at once.
    others = [[(j + d) % p if p & (p - 1) else j ^ d for d in range(1, p)] for j in range(p)]
    return exchange([(ranks[j], ranks[others[j][d]], size / p) for d in range(p - 1) for j in range(p)], "all")


# -- two levels: `units` are ranks of a node, and nodes ----------------------------------------------------------------


def _rows(units: tuple[int, int]) -> list[list[int]]:
    return [list(range(node * units[0], (node + 1) * units[0])) for node in range(units[1])]


def _columns(units: tuple[int, int]) -> list[list[int]]:
    return [[node * units[0] + place for node in range(units[1])] for place in range(units[0])]


def by_level(
    units: tuple[int, int],
    inside: Callable[[list[int], str], Schedule],
    across: Callable[[list[int], str], Schedule],
    after: Callable[[list[int], str], Schedule] | None = None,
) -> Schedule:
    """Run a schedule in every node, then one between ranks at the same place, then one in every node."""
    parts = [inside(row, f"row {n} ") for n, row in enumerate(_rows(units))]
    parts += [across(column, f"column {n} ") for n, column in enumerate(_columns(units))]
    parts += [after(row, f"row {n} after ") for n, row in enumerate(_rows(units))] if after else []
    return joined(*parts)


def leaders(units: tuple[int, int]) -> list[int]:
    return [row[0] for row in _rows(units)]


def hierarchical_ring(units: tuple[int, int], size: float, pieces: int) -> Schedule:
    up = [chain(row[::-1], size, pieces, f"up {n} ") for n, row in enumerate(_rows(units))]
    down = [chain(row, size, pieces, f"down {n} ") for n, row in enumerate(_rows(units))]
    return joined(*up, ring(leaders(units), size, "leaders"), *down)


def tree_by_level(units: tuple[int, int], size: float, kind: str) -> Schedule:
    """Binomial trees of the leaders and of every node."""
    rows = _rows(units)
    if kind == "broadcast":
        return joined(broadcast_tree(leaders(units), size), *(broadcast_tree(row, size, f"b{row[0]} ") for row in rows))
    if kind == "reduce":
        return joined(*(reduce_tree(row, size, f"r{row[0]} ") for row in rows), reduce_tree(leaders(units), size))
    inner = size / units[1]
    if kind == "scatter":
        return joined(scatter_tree(leaders(units), size), *(scatter_tree(row, inner, f"s{row[0]} ") for row in rows))
    assert kind == "gather", kind
    return joined(*(gather_tree(row, inner, f"g{row[0]} ") for row in rows), gather_tree(leaders(units), size))
