"""Measured times of runs, each with what a simulated bench would make of it."""
