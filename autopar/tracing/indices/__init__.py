"""Tensors as functions of their indices."""
