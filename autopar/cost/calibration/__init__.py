"""Constants of a cluster, fitted to measurements."""
