"""Clusters: devices, links, and the files that describe them."""
