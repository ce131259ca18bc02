"""Demonstrations, answers with their rewards, and teachers."""
