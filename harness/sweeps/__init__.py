"""Sweeps: one scenario simulated at many points, what they cost, and what follows from both."""
