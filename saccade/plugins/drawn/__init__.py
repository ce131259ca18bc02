"""Data sets that are drawn in place or asked of a model, and the `data` commands."""
