"""Videos and sounds."""
