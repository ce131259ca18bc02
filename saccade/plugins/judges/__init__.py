"""Rewards from external services: a judge model, a reward service."""
