"""A run in small: `--smoke`."""
