"""Time of ops on one device, from FLOPs and bytes."""
