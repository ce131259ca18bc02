"""Public test sets by name."""
