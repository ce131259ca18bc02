"""The loops, one file each: the only place where parts are wired together."""
