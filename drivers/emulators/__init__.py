"""Emulated switches: real wire protocols, real timing, and light that moves real packets."""
