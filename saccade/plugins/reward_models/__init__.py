"""Reward models: heads, losses, training, and use as a reward term."""
