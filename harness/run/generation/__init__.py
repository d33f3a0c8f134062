"""Generation that changes shape: requests, instances, switches of layout and moves of requests."""
