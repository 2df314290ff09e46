"""Tables of measured times beside the formulas of a cluster file: reading, writing, interpolating."""
