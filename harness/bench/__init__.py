"""The worlds behind one protocol."""
