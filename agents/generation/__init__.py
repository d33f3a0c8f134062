"""Generation on a node: the labour that keeps engines, their rank processes, and the engines."""
