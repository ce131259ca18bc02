"""Drawn scenes to search, an expert, cold starts, and the `data` commands."""
