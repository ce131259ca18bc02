"""Rewards become an update here: axes of pure functions, and rows that name one of each.

`config/schema/presets.yaml` holds the rows, `build.build` makes an `Algorithm` of a config,
`annotate` writes what is known before training, `objective` is the loss. Nothing in this folder knows
of models or engines. The tables import no torch; `annotate` and `objective` do.
"""
