"""Ends a run in which nothing moves any more, with the stacks of all its processes."""
