"""Decisions about requests and instances: pure functions of what is known at the moment."""
