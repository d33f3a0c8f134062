"""RLSim: models and solvers of the simulated world. Values in, values out; virtual time."""
