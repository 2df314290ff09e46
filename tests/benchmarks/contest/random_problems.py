"""Small random problems: some with impossible costs, some with limits, some that cannot be solved."""

from __future__ import annotations

import numpy as np

from benchmarks.contest.problem import Edge, Problem, Usage


def random_problem(seed: int, limits: int, whole: bool) -> Problem:
    """limits: 0 none, 1 one for all nodes, 2 several over ranges; whole: costs are whole numbers."""
    random = np.random.default_rng(seed)
    count = int(random.integers(1, 8))
    sizes = [int(size) for size in random.integers(1, 5, count)]
    impossible = random.choice([0.0, 0.1, 0.5])

    def costs(*shape: int) -> np.ndarray:
        values = random.integers(0, 20, shape).astype(float)
        if not whole:
            values *= random.random()
        values[random.random(shape) < impossible] = np.inf
        return values

    node_costs = []
    for size in sizes:
        own = costs(size)
        own[random.integers(size)] = 1.0
        node_costs.append(own)
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j and random.random() < 0.3]
    edges = []
    for first, second in pairs:  # both directions may occur: parallel edges
        matrix = costs(sizes[first], sizes[second])
        kind = random.integers(4)
        if kind == 0:
            matrix = random.integers(0, 5, (sizes[first], 1)) + random.integers(0, 5, (1, sizes[second])) * 1.0
        elif kind == 1 and sizes[first] == sizes[second]:
            matrix = np.where(np.eye(sizes[first]) > 0, 0.0, np.inf)
        edges.append(Edge(first, second, matrix))
    usages = []
    spans = {0: 0, 1: 1, 2: int(random.integers(2, 6))}[limits]
    if spans:
        for node in range(count):
            for _ in range(int(random.integers(0, 3))):
                start, end = sorted(int(place) for place in random.integers(0, spans + 1, 2))
                usages.append(Usage(node, start, end, random.integers(0, 10, sizes[node])))
    tight = random.integers(4, 25, spans)
    return Problem(tuple(node_costs), tuple(edges), tuple(usages), tight.astype(np.int64))
