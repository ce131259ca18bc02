"""Imitation: demonstrations during RL, reward-tagged answers, and teachers."""
