"""What a run leaves behind: its folder, metrics, rollouts, progress display and report.

Nothing here imports torch, and nothing here can stop a training step: a logger that fails is
reported once and left out. `folder` owns the directory and its lock, `loggers` the metrics,
`trajectories` the rollouts, `console` the display, `clock` the time split, `metrics` the numbers
that follow from groups, `diagnosis` the line that says why nothing is learned, `report` (with
`charts`) the page.
"""
