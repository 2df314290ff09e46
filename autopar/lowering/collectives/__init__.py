"""Steps of reshards bound to one rank, and the process groups they run in."""
