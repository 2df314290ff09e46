"""Shardings of tensors, choices of ops, and the reshards between them."""
