"""Passes on the exported graph, one file each."""
