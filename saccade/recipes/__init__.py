"""The training loops, one file each, and the only place where parts are wired together."""
