"""What decides and remembers: scenarios, benches, orchestration and the record of a run."""
