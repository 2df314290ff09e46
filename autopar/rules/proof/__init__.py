"""Proof and discovery of rules by execution."""
