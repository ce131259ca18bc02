"""Row formats of other frameworks."""
