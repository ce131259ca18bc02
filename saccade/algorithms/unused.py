"""Options that are set and would do nothing: refused, with a value that gives them an effect.
Imports no torch.

    >>> refuse_unused(config, algorithm)   # raises ConfigError, or nothing
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce

from saccade.algorithms.algorithm import AXES, Algorithm
from saccade.algorithms.presets import COMMON, Row
from saccade.algorithms.table import unknown
from saccade.config import AlgorithmConfig
from saccade.errors import ConfigError

# options, when they have an effect, why not otherwise, what gives them one
CONDITIONS: list[tuple[tuple[str, ...], Callable[[Algorithm], bool], str, str]] = [
    (
        tuple(f"kl.{name}" for name in ("kind", "place", "clamp", "controller", "update")),
        lambda a: a.needs_reference,
        "kl.coef is 0",
        "algorithm.kl.coef=0.01",
    ),
    (
        ("kl.clamp",),
        lambda a: a.kl_in_loss and a.divergence.reads("clamp"),
        "kl.kind={a.kl.kind} in the {a.kl.place} has no clamped gradient",
        "algorithm.kl.kind=k3 algorithm.kl.place=loss",
    ),
    (
        ("kl.ratio_correct",),
        lambda a: a.kl_in_loss,
        "there is no KL in the loss",
        "algorithm.kl.coef=0.01 algorithm.kl.place=loss",
    ),
    (
        ("kl.target", "kl.horizon"),
        lambda a: a.needs_reference and a.kl.controller == "adaptive",
        "kl.coef is fixed",
        "algorithm.kl.controller=adaptive",
    ),
    (
        ("kl.update_every",),
        lambda a: a.reference_moves,
        "the reference stays as it is",
        "algorithm.kl.update=copy",
    ),
    (
        ("kl.ema",),
        lambda a: a.needs_reference and a.kl.update == "ema",
        "the reference is not blended",
        "algorithm.kl.update=ema",
    ),
    (
        (
            "filter.low",
            "filter.high",
            "filter.max_rounds",
            "filter.on_exhausted",
            "filter.keep_surplus",
        ),
        lambda a: a.filter.dynamic,
        "filter.dynamic is off",
        "algorithm.filter.dynamic=true",
    ),
    (
        ("overlong.factor",),
        lambda a: a.overlong.buffer > 0,
        "overlong.buffer is 0",
        "algorithm.overlong.buffer=512",
    ),
    (
        ("drop_constant", "excluded_in_baseline"),
        lambda a: a.estimator.group,
        "advantage {a.advantage} has no groups",
        "algorithm.advantage=grpo train.samples_per_prompt=8",
    ),
    (
        ("excluded_in_baseline",),
        lambda a: bool(a.exclude_status),
        "exclude_status is empty",
        "algorithm.exclude_status=[overturn]",
    ),
    (
        ("whiten",),
        lambda a: a.estimator.whiten is not None,
        "advantage {a.advantage} is never whitened",
        "algorithm.advantage=reinforce_pp",
    ),
    (
        ("whiten_std",),
        lambda a: a.whiten,
        "nothing is whitened",
        "algorithm.advantage=reinforce_pp algorithm.whiten=true",
    ),
    (
        ("clip",),
        lambda a: a.loss.reads("clip_low"),
        "policy loss {a.policy_loss} does not clip",
        "algorithm.policy_loss=clip",
    ),
    (
        ("reward_range",),
        lambda a: a.estimator.domains,
        "advantage {a.advantage} does not read it",
        "algorithm.advantage=drpo",
    ),
    (
        ("entropy_step", "entropy_range"),
        lambda a: a.entropy.target > 0,
        "entropy_coef is fixed",
        "algorithm.entropy_target=0.2",
    ),
    (
        ("entropy_scope",),
        lambda a: a.entropy.top > 0,
        "entropy_top is 0",
        "algorithm.entropy_top=0.2",
    ),
    (
        ("self_normalise",),
        lambda a: any(c.entry.weighs for c in a.corrections),
        "no correction gives weights",
        "algorithm.correct=[tis.token]",
    ),
    (
        ("denominator",),
        lambda a: a.entropy.top > 0 or bool(a.at_once),
        "no filter drops tokens",
        "algorithm.entropy_top=0.2",
    ),
    (
        ("fire.top_k", "fire.first_token", "fire.cap"),
        lambda a: a.fire.temperature > 0,
        "fire.temperature is 0",
        "algorithm.fire.temperature=10",
    ),
    (
        ("fire.cap",),
        lambda a: a.fire.first_token == "is",
        "the first token is not trained",
        "algorithm.fire.first_token=is",
    ),
    (
        tuple(
            f"critic.{name}"
            for name in ("lr", "clip", "warmup_steps", "bootstrap_truncated", "path")
        ),
        lambda a: a.needs_critic,
        "advantage {a.advantage} has no critic",
        "algorithm.advantage=gae",
    ),
]


def refuse_unused(config: AlgorithmConfig, algorithm: Algorithm) -> None:
    """An option that is set and would do nothing is a misunderstanding; one that is switched off is
    none.
    """
    _refuse_unread(config, algorithm)
    for names, works, reason, remedy in CONDITIONS:
        for name in names:
            value = _value(config, name)
            off = value is False and COMMON.get(name) is False
            if not works(algorithm) and value is not None and not off:
                raise _unused(name, reason.format(a=algorithm), remedy)


def has_effect(name: str, algorithm: Algorithm) -> bool:
    return all(works(algorithm) for names, works, _, _ in CONDITIONS if name in names)


def _refuse_unread(config: AlgorithmConfig, algorithm: Algorithm) -> None:
    entries = [entry for _, entry, _ in algorithm.axes.values()]
    entries += [algorithm.divergence, *(correction.entry for correction in algorithm.corrections)]
    read = {name for entry in entries for name in entry.options}
    for axis, table in AXES.items():
        for option in AlgorithmConfig.model_fields:
            readers = [name for name, entry in table.items() if entry.reads(option)]
            if readers and option not in read and _value(config, option) is not None:
                reason = f"{axis} {getattr(algorithm, axis)} does not read it"
                raise _unused(option, reason, f"algorithm.{axis}={readers[0]}")
    for name in config.args:
        if name in AlgorithmConfig.model_fields:
            raise ConfigError(f"algorithm.args: {name} is an option: write algorithm.{name}=…")
        for axis, table in AXES.items() if name not in read else ():
            readers = [other for other, entry in table.items() if entry.reads(name)]
            if readers:
                reason = f"{axis} {getattr(algorithm, axis)} does not read it"
                raise _unused(f"args.{name}", reason, f"algorithm.{axis}={readers[0]}")
        if name not in read:
            raise unknown(
                "algorithm.args", name, sorted(read - AlgorithmConfig.model_fields.keys())
            )


def refuse_unread_add_ons(
    config: AlgorithmConfig, algorithm: Algorithm, add_ons: Mapping[str, Row]
) -> None:
    """An add-on that the row's functions do not read would do nothing."""
    for add_on in config.preset.split("+")[1:]:
        for option in add_ons[add_on]:
            for axis, (name, entry, _) in algorithm.axes.items():
                readers = [other for other, row in AXES[axis].items() if row.reads(option)]
                if readers and not entry.reads(option):
                    raise ConfigError(
                        f"algorithm.preset={config.preset}: +{add_on} has no effect, {axis} {name} "
                        f"does not read {option}; remove it, or use algorithm.{axis}={readers[0]}"
                    )


def _value(config: AlgorithmConfig, name: str) -> object:
    return reduce(getattr, name.split("."), config)


def _unused(option: str, reason: str, remedy: str) -> ConfigError:
    return ConfigError(
        f"algorithm.{option} is set but has no effect: {reason}; remove it, or use {remedy}"
    )
