"""Graph passes of the lowering, one file each."""
