"""The abstract search: one strategy per node, pairwise costs, usage limits. It knows nothing of tensors."""
