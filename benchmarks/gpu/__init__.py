"""One GPU in under eight minutes: time, memory, host waits, kernels and correctness. See docs/gpu.md."""
