"""What a plan costs: time, communication and memory, from constants of the cluster."""
