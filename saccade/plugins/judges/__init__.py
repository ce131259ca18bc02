"""Rewards that are asked for elsewhere: a judge model, a reward service."""
