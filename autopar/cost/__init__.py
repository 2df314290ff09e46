"""What a plan costs: clusters as data, the price of communication, of computation, of memory."""
