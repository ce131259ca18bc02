"""Decoders some of whose layers keep a recurrent state instead of keys and values."""
