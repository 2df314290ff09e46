"""Collective algorithms by the names that library files use."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

from autopar.cost import collective_algorithms as one_after_another
from autopar.cost import logarithmic_algorithms as in_pairs
from autopar.cost.collective_algorithms import AlgorithmPhases

# Each returns None where it cannot run.
ALGORITHMS: Mapping[str, AlgorithmPhases] = MappingProxyType(
    {
        "ring": one_after_another.ring,
        "ring_and_slice": one_after_another.ring_and_slice,
        "double_binary_tree": one_after_another.double_binary_tree,
        "tree_of_chains": one_after_another.tree_of_chains,
        "exchange_of_chains": one_after_another.exchange_of_chains,
        "halving_doubling": in_pairs.halving_doubling,
        "recursive_doubling": in_pairs.recursive_doubling,
        "binary_blocks": in_pairs.binary_blocks,
        "binomial": in_pairs.binomial,
        "scatter_ring": in_pairs.scatter_ring,
        "ring_gather": in_pairs.ring_gather,
        "bruck": in_pairs.bruck,
        "pat": in_pairs.pat,
        "pairwise": in_pairs.pairwise,
        "hierarchical_ring": one_after_another.hierarchical_ring,
        "torus": one_after_another.torus,
        "nvls": one_after_another.nvls,
        "nvls_tree": one_after_another.nvls_tree,
        "nvls_exchange": one_after_another.nvls_exchange,
        # The network switches reduce: all data goes up once and down once.
        "sharp": partial(one_after_another.nvls_outer, hops=lambda units: 2.0, traffic=lambda units: 1.0),
        "direct": one_after_another.direct,
        "hierarchical_all_to_all": in_pairs.hierarchical_all_to_all,
    }
)
