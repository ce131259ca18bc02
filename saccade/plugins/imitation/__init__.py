"""Demonstrations and teachers beside rewards."""
