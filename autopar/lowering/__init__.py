"""From a plan to a module that runs it."""
