"""One shard of a call: local arguments, and functions for ops that need more than a smaller shape."""
