"""Drawn scenes to search, an expert, and cold starts."""
