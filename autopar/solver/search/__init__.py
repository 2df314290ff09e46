"""Search over the model: bounds, multipliers, incumbents."""
