"""Plans as people meet them: written, read, summed up, explained, compared."""
