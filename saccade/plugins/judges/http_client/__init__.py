"""Asking a model behind an endpoint, for whoever needs its answers: an engine or a judge."""
