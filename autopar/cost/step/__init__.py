"""All tasks of a step in order, and the time they take together."""
