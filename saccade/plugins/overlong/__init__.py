"""Policies for prompts that are too long."""
