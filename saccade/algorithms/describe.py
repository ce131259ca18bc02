"""An algorithm in words, for `saccade algorithms` and for the start of a run. Imports no torch.

>>> print(explain("dapo"))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from saccade.algorithms.algorithm import Algorithm
from saccade.algorithms.build import resolve
from saccade.algorithms.presets import PRESETS
from saccade.algorithms.table import Entry
from saccade.config import AlgorithmConfig, RolloutConfig


def explain(preset: str | None = None) -> str:
    """All presets in a line each, or one of them in full."""
    if preset is None:
        return "\n".join(f"{name:<22} {row['about']}" for name, row in PRESETS.items())
    return describe(resolve(AlgorithmConfig(preset=preset), max_tokens=RolloutConfig().max_tokens))


def describe(algorithm: Algorithm) -> str:
    """The resolved row: every axis with its formula and the numbers in it."""
    paper = f" (arXiv {algorithm.paper})" if algorithm.paper else ""
    lines = {
        "advantage": _part(
            algorithm.advantage, algorithm.estimator, algorithm.advantage_options, ("std_eps",)
        ),
        "policy loss": _part(
            algorithm.policy_loss,
            algorithm.loss,
            algorithm.loss_options,
            ("clip_low", "clip_high", "dual_clip", "delta"),
        ),
        "aggregation": _part(
            algorithm.aggregation, algorithm.aggregate, algorithm, ("fixed_length",)
        ),
        "KL": _kl(algorithm),
        "old log-probs": OLD[algorithm.old],
        "samples": f"{algorithm.samples_per_prompt} per prompt",
    } | _extras(algorithm)
    return "\n".join(
        [f"{algorithm.preset}: {algorithm.about}{paper}"]
        + [f"  {name:<14} {text}" for name, text in lines.items()]
        + [f"  warning: {text}" for text in algorithm.warnings]
    )


OLD = {
    "detach": "detach: the current ones, ratio exactly 1",
    "recompute": "recompute: a pass of the trainer before the first update",
    "rollout": "rollout: those of the engine",
}


def _part(name: str, entry: Entry, options: Any, of_users: Sequence[str]) -> str:
    """`of_users`: what is shown for a function of the user, which may read anything."""
    read = of_users if entry.options is None else list(entry.options)
    values = {option: getattr(options, option) for option in read}
    shown = ", ".join(
        f"{option}={value:g}" if isinstance(value, float) else f"{option}={value}"
        for option, value in values.items()
        if value is not None
    )
    return f"{name}: {entry.formula}" + (f"   [{shown}]" if shown else "")


def _kl(algorithm: Algorithm) -> str:
    if not algorithm.needs_reference:
        return "none; no reference model is loaded"
    kl, entry = algorithm.kl, algorithm.divergence
    clamp = f"   [clamp={kl.clamp}]" if algorithm.kl_in_loss and entry.reads("clamp") else ""
    where = f"{kl.coef:g} * {kl.kind} in the {kl.place}"
    return f"{where}: {entry.formula}, u = policy - reference{clamp}"


def _extras(algorithm: Algorithm) -> dict[str, str]:
    """Lines for what is switched on."""
    lines, filters, overlong = {}, algorithm.filter, algorithm.overlong
    if algorithm.adv_clip is not None:
        lines["clip of A"] = f"+-{algorithm.adv_clip:g}"
    if algorithm.entropy_coef:
        lines["entropy bonus"] = f"{algorithm.entropy_coef:g}"
    if algorithm.drop_constant:
        lines["constant"] = "groups without a difference are left out of the update"
    if algorithm.exclude_status:
        kept = ", kept in the baseline" if algorithm.excluded_in_baseline else ""
        lines["excluded"] = ", ".join(algorithm.exclude_status) + kept
    if filters.dynamic:
        lines["filter"] = (
            f"keep groups with {filters.low:g} < mean outcome < {filters.high:g}, at most "
            f"{filters.max_rounds} rounds, then {filters.on_exhausted}"
        )
    if filters.function is not None:
        lines["own filter"] = filters.function
    if overlong.buffer:
        lines["overlong"] = (
            f"0 to -{overlong.factor:g} over the last {overlong.buffer} of "
            f"{overlong.max_tokens} tokens"
        )
    return lines
