"""What a run records: its folder, metrics, rollouts, checkpoints and display.

A logger that fails is reported once and left out; only a checkpoint that cannot be written stops training. Plugins add
the reports and metrics that are made from these records.
"""
