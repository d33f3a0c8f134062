"""Generation as the coordinator runs it: requests, instances, and how their layout changes."""
