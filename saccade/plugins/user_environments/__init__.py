"""Environments of the user, each episode in a process."""
