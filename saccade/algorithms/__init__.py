"""Rewards become an update here: four axes of pure functions, and rows that name one of each.

`presets` holds the rows, `build.resolve` makes an `Algorithm` of a config, `objective` is the loss.
Nothing in this folder knows of models or engines. The tables import no torch; `objective`, `value`
and `columns` do.
"""
