"""torch.export, and the repair of what it loses."""
