"""Rules by family of ops, one file each."""
