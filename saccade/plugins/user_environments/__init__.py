"""Runs the user's environments, each episode in its own process."""
