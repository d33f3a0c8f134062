"""Training on a node: ranks of a torch process group, and the trainers that they run."""
