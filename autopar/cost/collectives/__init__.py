"""Time of collectives on the links that their ranks span."""
