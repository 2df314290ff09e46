"""Solver of the abstract problem: one strategy per node, pairwise costs, usage limits. Tensors are unknown to it."""
