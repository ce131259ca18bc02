"""Samples → trajectories: the episode, the only multi-turn loop, and the collector that runs many
of them at once.
"""
