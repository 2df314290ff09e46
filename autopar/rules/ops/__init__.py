"""Rules of the table by family of ops, one file each."""
