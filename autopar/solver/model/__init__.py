"""The optimisation model: sets, variables, factors, objective."""
