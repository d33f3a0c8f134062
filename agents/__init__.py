"""Labour on a node: processes that run collectives and generation for a coordinator."""
