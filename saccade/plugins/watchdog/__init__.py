"""Ends a run that makes no progress, and writes the stacks of all its processes."""
