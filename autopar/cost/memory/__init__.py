"""Peak memory of a step, op by op."""
