"""From a model to a named graph."""
