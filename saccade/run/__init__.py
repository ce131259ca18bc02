"""What a run leaves behind: its folder, metrics, rollouts, checkpoints and display.

A logger that fails is reported once and left out; nothing here can stop a training step but a
checkpoint that cannot be written. Plugins add what is drawn and counted from these records.
"""
