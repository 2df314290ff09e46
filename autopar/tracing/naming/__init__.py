"""Rules bound to nodes, and one name for every dim."""
