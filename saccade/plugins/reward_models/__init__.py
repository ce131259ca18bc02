"""Models that score: heads, losses, training, use as a reward."""
