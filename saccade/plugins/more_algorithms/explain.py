"""`saccade algorithms`: what each preset is, in words. Imports no torch.

>>> print(explain("dapo"))
"""

from saccade.algorithms.build import resolve
from saccade.algorithms.describe import describe
from saccade.config import AlgorithmConfig, RolloutConfig
from saccade.config.schema.presets import ADD_ONS, PRESETS

AHEAD = (
    "ahead: with rollout.ahead, tokens of older weights are weighed (tis.token), or the loss is made for them\n"
    "(old=rollout), or the preset is strictly on-policy (refused)"
)


def explain(preset: str | None = None) -> str:
    """All presets and add-ons, one line each, or one preset in full."""
    if preset is None:
        rows = [f"{name:<22} {ahead_of(name):<12} {row['about']}" for name, row in PRESETS.items()]
        extras = [f"{name:<22} {row['about']}" for name, row in ADD_ONS.items()]
        added = "to be added to any of them, as in algorithm.preset=[dapo, tis]:"
        return "\n".join([f"{'preset':<22} {'ahead':<12} what it is", *rows, "", added, *extras, "", AHEAD])
    row = resolve(AlgorithmConfig(preset=(preset,)), max_tokens=RolloutConfig().max_tokens)
    return f"{describe(row)}\n  with rollout.ahead: {ahead_of(preset)}"


def ahead_of(preset: str) -> str:
    """What a preset does by default with tokens of older weights."""
    if PRESETS[preset].get("on_policy"):
        return "refused"
    row = resolve(AlgorithmConfig(preset=(preset,)), max_tokens=RolloutConfig().max_tokens, ahead=1)
    return "old=rollout" if row.old == "rollout" else row.corrections[0].name
