"""Executes a scenario on a bench."""
