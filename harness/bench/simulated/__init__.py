"""The simulated world: agents, switches and a network that are models, on a clock that jumps."""
