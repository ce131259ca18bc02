"""Asking a model behind an endpoint, for an engine or a judge."""
