"""Model folders, model families and the tiny models that are built in place."""
