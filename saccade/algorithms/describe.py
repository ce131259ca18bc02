"""An algorithm in words, for `saccade algorithms` and for the start of a run. Imports no torch.

>>> print(explain("dapo"))
"""

from __future__ import annotations

from functools import reduce
from math import isinf
from typing import Any

from saccade.algorithms.build import resolve
from saccade.algorithms.resolved_algorithm import Algorithm, Options
from saccade.config import AlgorithmConfig, RolloutConfig, options
from saccade.config.schema.presets import ADD_ONS, PRESETS
from saccade.config.schema.section import about


def explain(preset: str | None = None) -> str:
    """All presets and add-ons in a line each, or one of them in full."""
    if preset is None:
        rows, extras = ([f"{name:<22} {row['about']}" for name, row in t.items()] for t in (PRESETS, ADD_ONS))
        return "\n".join([*rows, "", "to be added to any of them, as in algorithm.preset=[dapo, tis]:", *extras])
    return describe(resolve(AlgorithmConfig(preset=(preset,)), max_tokens=RolloutConfig().max_tokens))


def describe(algorithm: Algorithm) -> str:
    """The resolved row: every axis with its formula and the numbers in it."""
    paper = f" (arXiv {algorithm.paper})" if algorithm.paper else ""
    samples = f"{algorithm.samples_per_prompt} per prompt"
    if algorithm.updates_per_step > 1:
        samples += f", {algorithm.updates_per_step} updates per step"
    lines = {
        **{
            axis.replace("_", " "): f"{name}: {entry.formula}{_shown(options)}"
            for axis, (name, entry, options) in algorithm.axes.items()
        },
        "KL": _kl(algorithm),
        "old log-probs": OLD[algorithm.old],
        "samples": samples,
    } | extras(algorithm)
    return "\n".join(
        [f"{', '.join(algorithm.preset)}: {algorithm.about}{paper}"]
        + [f"  {name:<14} {text}" for name, text in lines.items()]
        + [f"  warning: {text}" for text in algorithm.warnings]
    )


def cells(algorithm: Algorithm) -> dict[str, Any]:
    """The `algorithm` section with the value of every option that has an effect."""
    scope, found = {"algorithm": algorithm}, dict[str, Any]()
    for name, field in options(AlgorithmConfig):
        value = reduce(getattr, name.split("."), algorithm)
        counts = all(when.holds(scope) for when in about(field)["when"])
        if value is not None and counts and name not in ("preset", "clip", "correct"):
            section, _, leaf = name.rpartition(".")
            (found.setdefault(section, {}) if section else found)[leaf] = value
    found["correct"] = [{"name": c.name, **c.options} for c in algorithm.corrections]
    return found


def resolved_options(algorithm: Algorithm) -> tuple[str, ...]:
    """Every option that has an effect as NAME=VALUE, for a checkpoint."""
    names = ("samples_per_prompt", "updates_per_step", "reward_clip", "reward_normalise")
    beside = {name: getattr(algorithm, name) for name in names}
    inside = {f"algorithm.{name}": value for name, value in cells(algorithm).items()}
    ordered = {k: dict(sorted(v.items())) if isinstance(v, dict) else v for k, v in (inside | beside).items()}
    return tuple(f"{name}={value}" for name, value in ordered.items())


OLD = {
    "detach": "detach: the current ones, ratio exactly 1",
    "recompute": "recompute: a pass of the trainer before the first update",
    "rollout": "rollout: those of the engine",
}


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
    text += _shown(algorithm.kl_options if algorithm.kl_in_loss else {})
    if kl.ratio_correct:
        text += ", times the ratio"
    if kl.controller == "adaptive":
        text += f"; the coefficient aims at {kl.target:g} over {kl.horizon:g} sequences"
    if kl.update != "none":
        share = f" (share {kl.ema:g})" if kl.update == "ema" else ""
        text += f"; reference: {kl.update} every {kl.update_every} steps{share}"
    return text


def extras(algorithm: Algorithm) -> dict[str, str]:
    """Lines for what is switched on."""
    a, critic, limits, overlong = algorithm, algorithm.critic, algorithm.filter, algorithm.overlong
    fire, bounds, coef, target = a.hot_first_token, a.reward_clip, a.entropy_coef, a.entropy_target
    differing = isinf(limits.low) and isinf(limits.high)
    kept = "whose outcomes differ" if differing else f"with {limits.low:g} < mean outcome < {limits.high:g}"
    surplus = "; surplus is carried one step" if limits.keep_surplus else ""
    trained = "weighted" if fire.first_token == "is" else "not trained"
    corrections = "; ".join(f"{c.name}: {c.entry.formula}{_shown(c.options)}" for c in a.corrections)
    lines: dict[str, object] = {
        "whitening": a.whiten and "over the live tokens of the step" + ("" if a.whiten_std else ", mean only"),
        "clip of A": a.adv_clip and f"+-{a.adv_clip:g}",
        "critic": a.needs_critic and f"lr {critic.lr:g}, value clip {critic.clip:g}, {critic.warmup_steps} steps alone",
        "reward": a.reward_normalise != "off" and f"normalised by running moments ({a.reward_normalise})",
        "clip of R": bounds and f"{bounds[0]:g} to {bounds[1]:g}",
        "entropy bonus": (coef or target) and f"{coef:g}" + (f", steered to {target:g}" if target else ""),
        "entropy filter": a.entropy_top and f"policy loss on the top {a.entropy_top:g} of each {a.entropy_scope}",
        "corrections": corrections and corrections + (", self-normalised" if a.self_normalise else ""),
        "denominator": a.denominator == "kept" and "tokens that filters kept",
        "constant": a.drop_constant and "groups without a difference are left out of the update",
        "excluded": ", ".join(a.exclude_status) + (", kept in the baseline" if a.excluded_in_baseline else ""),
        "filter": limits.dynamic
        and f"keep groups {kept}, at most {limits.max_rounds} rounds, then {limits.on_exhausted}{surplus}",
        "own filter": limits.function,
        "overlong": overlong.buffer
        and f"0 to -{overlong.factor:g} over the last {overlong.buffer} of {a.max_tokens} tokens",
        "first token": fire.temperature
        and f"at temperature {fire.temperature:g}, {trained}{_shown({'top_k': fire.top_k})}",
    }
    return {name: str(text) for name, text in lines.items() if text}
