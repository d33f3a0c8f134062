"""Route steering on electrical top-of-rack switches."""
