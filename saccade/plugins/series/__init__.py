"""Time series: files, and an encoder on top of any family."""
