"""One shard of a call: local arguments, and the ops that need more than a smaller shape."""
