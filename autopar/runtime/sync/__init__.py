"""Replicas that drift: what they send each other at meetings, and when."""
