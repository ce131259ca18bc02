"""Verifiers: what an answer is worth, by rules."""
