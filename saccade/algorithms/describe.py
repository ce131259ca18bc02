"""An algorithm in words, for `saccade algorithms` and for the start of a run. Imports no torch.

>>> print(explain("dapo"))
"""

from __future__ import annotations

from math import isinf
from typing import Any

from saccade.algorithms.algorithm import Algorithm, Filter, Options
from saccade.algorithms.build import resolve
from saccade.algorithms.presets import ADD_ONS, PRESETS
from saccade.algorithms.table import Entry
from saccade.algorithms.unused import has_effect
from saccade.config import AlgorithmConfig, RolloutConfig, options


def explain(preset: str | None = None) -> str:
    """All presets and add-ons in a line each, or one of them in full."""
    if preset is None:
        rows = [f"{name:<22} {row['about']}" for name, row in PRESETS.items()]
        extras = [f"+{name:<21} {row['about']}" for name, row in ADD_ONS.items()]
        return "\n".join([*rows, "", "to be added to any of them, as in dapo+tis:", *extras])
    return describe(resolve(AlgorithmConfig(preset=preset), max_tokens=RolloutConfig().max_tokens))


def describe(algorithm: Algorithm) -> str:
    """The resolved row: every axis with its formula and the numbers in it."""
    paper = f" (arXiv {algorithm.paper})" if algorithm.paper else ""
    samples = f"{algorithm.samples_per_prompt} per prompt"
    if algorithm.updates_per_step > 1:
        samples += f", {algorithm.updates_per_step} updates per step"
    lines = {
        **{axis.replace("_", " "): _part(*chosen) for axis, chosen in algorithm.axes.items()},
        "KL": _kl(algorithm),
        "old log-probs": OLD[algorithm.old],
        "samples": samples,
    } | extras(algorithm)
    return "\n".join(
        [f"{algorithm.preset}: {algorithm.about}{paper}"]
        + [f"  {name:<14} {text}" for name, text in lines.items()]
        + [f"  warning: {text}" for text in algorithm.warnings]
    )


def cells(algorithm: Algorithm) -> dict[str, Any]:
    """The `algorithm` section with every cell filled in that has an effect."""
    filled = {k: v for _, _, chosen in algorithm.axes.values() for k, v in chosen.items()}
    filled |= {f"entropy_{name}": value for name, value in vars(algorithm.entropy).items()}
    filled["correct"] = [{"name": c.name, **c.options} for c in algorithm.corrections]
    found: dict[str, Any] = {}
    for name, _ in options(AlgorithmConfig):
        section, _, leaf = name.rpartition(".")
        holder = getattr(algorithm, section) if section else algorithm
        known = (filled if not section else getattr(holder, "options", {})) | vars(holder)
        if leaf in known and known[leaf] is not None and has_effect(name, algorithm):
            home = found.setdefault(section, {}) if section else found
            home[leaf] = known[leaf]
    return found


OLD = {
    "detach": "detach: the current ones, ratio exactly 1",
    "recompute": "recompute: a pass of the trainer before the first update",
    "rollout": "rollout: those of the engine",
}


def _part(name: str, entry: Entry, options: Options) -> str:
    return f"{name}: {entry.formula}" + _shown(options)


def numbers(options: Options) -> str:
    """Names and numbers; what is off (0) or unlimited is left out."""
    return ", ".join(
        f"{option}={value:g}" if isinstance(value, float) else f"{option}={value}"
        for option, value in options.items()
        if value is not None and value is not False and value not in (0.0, float("inf"))
    )


def _shown(options: Options) -> str:
    text = numbers(options)
    return f"   [{text}]" if text else ""


def _kl(algorithm: Algorithm) -> str:
    if not algorithm.needs_reference:
        return "none; no reference model is loaded"
    kl, entry = algorithm.kl, algorithm.divergence
    text = f"{kl.coef:g} * {kl.kind} in the {kl.place}: {entry.formula}, u = policy - reference"
    text += _shown(kl.options if algorithm.kl_in_loss else {})
    if kl.ratio_correct:
        text += ", times the ratio"
    if kl.controller == "adaptive":
        text += f"; the coefficient aims at {kl.target:g} over {kl.horizon:g} sequences"
    if kl.update != "none":
        share = f" (share {kl.ema:g})" if kl.update == "ema" else ""
        text += f"; reference: {kl.update} every {kl.update_every} steps{share}"
    return text


def _kept(filters: Filter) -> str:
    if isinf(filters.low) and isinf(filters.high):
        return "keep groups whose outcomes differ"
    return f"keep groups with {filters.low:g} < mean outcome < {filters.high:g}"


def extras(algorithm: Algorithm) -> dict[str, str]:
    """Lines for what is switched on."""
    filters, overlong, entropy = algorithm.filter, algorithm.overlong, algorithm.entropy
    fire, critic = algorithm.fire, algorithm.critic
    weights = "weighted" if fire.first_token == "is" else "not trained"
    kept = ", kept in the baseline" if algorithm.excluded_in_baseline else ""
    bounds = algorithm.reward_clip or (0.0, 0.0)
    lines: list[tuple[object, str, str]] = [
        (
            algorithm.whiten,
            "whitening",
            "over the live tokens of the step" + ("" if algorithm.whiten_std else ", mean only"),
        ),
        (algorithm.adv_clip, "clip of A", f"+-{algorithm.adv_clip:g}"),
        (
            algorithm.needs_critic,
            "critic",
            f"lr {critic.lr:g}, value clip {critic.clip:g}, {critic.warmup_steps} steps alone",
        ),
        (
            algorithm.reward_normalise != "off",
            "reward",
            f"normalised by running moments ({algorithm.reward_normalise})",
        ),
        (algorithm.reward_clip, "clip of R", f"{bounds[0]:g} to {bounds[1]:g}"),
        (
            entropy.coef or entropy.target,
            "entropy bonus",
            f"{entropy.coef:g}" + (f", steered to {entropy.target:g}" if entropy.target else ""),
        ),
        (
            entropy.top,
            "entropy filter",
            f"policy loss on the top {entropy.top:g} of each {entropy.scope}",
        ),
        (
            algorithm.corrections,
            "corrections",
            "; ".join(
                f"{c.name}: {c.entry.formula}{_shown(c.options)}" for c in algorithm.corrections
            )
            + (", self-normalised" if algorithm.self_normalise else ""),
        ),
        (algorithm.denominator == "kept", "denominator", "tokens that filters kept"),
        (
            algorithm.drop_constant,
            "constant",
            "groups without a difference are left out of the update",
        ),
        (algorithm.exclude_status, "excluded", ", ".join(algorithm.exclude_status) + kept),
        (
            filters.dynamic,
            "filter",
            f"{_kept(filters)}, at most {filters.max_rounds} rounds, then {filters.on_exhausted}"
            + ("; surplus is carried one step" if filters.keep_surplus else ""),
        ),
        (filters.function, "own filter", f"{filters.function}"),
        (
            overlong.buffer,
            "overlong",
            f"0 to -{overlong.factor:g} over the last {overlong.buffer} of "
            f"{overlong.max_tokens} tokens",
        ),
        (
            fire.temperature,
            "first token",
            f"at temperature {fire.temperature:g}, {weights}{_shown({'top_k': fire.top_k})}",
        ),
    ]
    return {name: text for switched_on, name, text in lines if switched_on}
