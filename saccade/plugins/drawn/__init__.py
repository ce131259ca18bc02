"""Synthetic data sets (drawn pictures, or written by a teacher model), and the `saccade data` commands."""
