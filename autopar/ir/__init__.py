"""The intermediate representation: a named graph, and what follows from it."""
