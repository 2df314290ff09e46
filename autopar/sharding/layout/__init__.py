"""Layouts: the language in which users, strategies and plans say how tensors are split."""
