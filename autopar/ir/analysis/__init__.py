"""Facts about a named graph that several stages read."""
