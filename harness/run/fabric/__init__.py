"""RFabric at work: circuits that follow the phases of a run, while it goes on."""
