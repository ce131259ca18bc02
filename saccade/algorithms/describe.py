"""An algorithm in words, for the start of a run. Imports no torch.

print(describe(resolve(AlgorithmConfig(preset=("dapo",)), max_tokens=64)))
"""

from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Any

from saccade.algorithms.resolved_algorithm import Algorithm
from saccade.config import AlgorithmConfig, options
from saccade.config.notation import write
from saccade.config.schema.section import extra

IN_OTHER_LINES = ("advantage", "policy_loss", "aggregation", "args", "kl.coef", "kl.kind", "kl.place")


def describe(algorithm: Algorithm) -> str:
    """Every chosen function with its formula and its numbers, then the other options that are not default."""
    lines = {}
    for axis, entries in algorithm.chosen.items():
        shown = [(f"{entry.name}: {entry.formula}", numbers(entry.options)) for entry in entries]
        lines[axis] = "; ".join(text + (f"   [{found}]" if found else "") for text, found in shown)
    weighed = f"{algorithm.kl.coef:g} in the {algorithm.kl.place} * {lines['kl.kind']}, u = policy - reference"
    lines["kl.kind"] = weighed if algorithm.needs_reference else "none; no reference model is loaded"
    lines["samples"] = f"{algorithm.samples_per_prompt} per prompt, {algorithm.updates_per_step} updates per step"
    return "\n".join(
        [f"{', '.join(algorithm.preset)}: {algorithm.about}" + f" (arXiv {algorithm.paper})" * bool(algorithm.paper)]
        + [f"  {name:<12} {text}" for name, text in lines.items() if text]
        + [f"  {name}={value}: {text}" for name, (value, text) in extras(algorithm).items()]
        + [f"  warning: {text}" for text in algorithm.warnings]
    )


def extras(algorithm: Algorithm) -> dict[str, tuple[str, str]]:
    """Options that differ from their defaults, except arguments of functions: name → (value, description)."""
    found = {
        name: (write(value, flow=True).splitlines()[0], field.description)
        for name, field, value in _in_effect(algorithm)
        if value != field.default and (value or field.default) and name not in IN_OTHER_LINES
    }
    if algorithm.reward_clip:
        found["reward.clip"] = f"{[*algorithm.reward_clip]}", "Limits of the reward."
    if algorithm.reward_normalise != "off":
        found["reward.running_norm"] = algorithm.reward_normalise, "Normalised by running moments."
    return found


def _in_effect(algorithm: Algorithm) -> Iterator[tuple[str, Any, Any]]:
    """Name, field and value of every option that has an effect."""
    for name, field in options(AlgorithmConfig):
        value = reduce(getattr, name.split("."), algorithm)
        counts = all(when.holds({"algorithm": algorithm}) for when in extra(field)["when"])
        if value is not None and counts and name not in ("preset", "correct"):
            yield name, field, value


def options_in_effect(algorithm: Algorithm) -> dict[str, Any]:
    """The `algorithm` section with the value of every option that has an effect."""
    found = dict[str, Any]()
    for name, _, value in _in_effect(algorithm):
        section, _, leaf = name.rpartition(".")
        (found.setdefault(section, {}) if section else found)[leaf] = value
    return found | {"correct": [{"name": c.name, **c.options} for c in algorithm.corrections]}


def resolved_options(algorithm: Algorithm) -> tuple[str, ...]:
    """Every option that has an effect as NAME=VALUE, for a checkpoint."""
    names = ("samples_per_prompt", "updates_per_step", "reward_clip", "reward_normalise")
    beside = {name: getattr(algorithm, name) for name in names}
    inside = {f"algorithm.{name}": value for name, value in options_in_effect(algorithm).items()}
    ordered = {k: dict(sorted(v.items())) if isinstance(v, dict) else v for k, v in (inside | beside).items()}
    return tuple(f"{name}={value}" for name, value in ordered.items())


def numbers(options: Mapping[str, Any]) -> str:
    """Options as NAME=VALUE text, without those that are off (0, false) or unlimited."""
    return ", ".join(
        f"{option}={value:g}" if isinstance(value, float) else f"{option}={value}"
        for option, value in options.items()
        if value is not None and value is not False and value not in (0.0, float("inf"))
    )
