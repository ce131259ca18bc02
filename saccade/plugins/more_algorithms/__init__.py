"""Advantages and policy losses of further papers, each a row of the same tables."""
