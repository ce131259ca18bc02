"""RL algorithms: one table of pure functions per axis; a preset names one function of each.

`config/schema/presets.yaml` holds the presets, `build.build` makes an `Algorithm` of a config,
`annotate` writes per-token columns before training, `objective` is the loss. Nothing in this folder
knows of models or engines. The tables import no torch; `annotate` and `objective` do.
"""
