"""Modules that stand in the generated graph."""
