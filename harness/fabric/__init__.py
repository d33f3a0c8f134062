"""RFabric: where circuits go. Pure functions of a topology."""
