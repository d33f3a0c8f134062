"""Execution traces: read, checked at the door, and replayed on the network of a bench."""
