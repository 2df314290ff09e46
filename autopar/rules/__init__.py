"""Rules of ops: the notation, the table of all ops, the proof by execution, and discovery of missing rules."""
