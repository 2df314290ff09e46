"""The published tables: one file for each, from its rows to runs."""
