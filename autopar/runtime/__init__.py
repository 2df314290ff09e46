"""The parallel module: call cache, parameters, checkpoints, random keys."""
