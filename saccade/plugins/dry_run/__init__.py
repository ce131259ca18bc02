"""What `--dry-run` prints."""
