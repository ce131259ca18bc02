"""Sokoban: levels, an environment, a verifier."""
