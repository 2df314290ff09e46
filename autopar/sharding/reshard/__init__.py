"""Reshards: the cheapest steps from one sharding to another."""
