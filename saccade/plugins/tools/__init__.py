"""Environments with tools: zoom (crop), calculator, the user's functions."""
