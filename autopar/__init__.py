"""autopar: automatic parallelism for PyTorch."""
