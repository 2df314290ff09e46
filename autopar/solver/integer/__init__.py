"""The model as an integer linear program: formulation, solvers of OR-Tools, certificate, files."""
