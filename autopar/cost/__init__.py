"""Cost model: clusters as data, and the time and memory of a step on them."""
