"""What a resolved algorithm must not be: contradictory, or holding options that do nothing.

Every refusal names the field, the reason and a value that works. Imports no torch.

    >>> refuse_contradictions(algorithm)   # raises ConfigError, or nothing
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

from saccade.algorithms.algorithm import AXES, Algorithm
from saccade.algorithms.filters import EXCLUDABLE
from saccade.algorithms.table import unknown
from saccade.config import AlgorithmConfig
from saccade.errors import ConfigError


def refuse_contradictions(algorithm: Algorithm) -> None:
    for status in algorithm.exclude_status:
        if status not in EXCLUDABLE:
            raise unknown("algorithm.exclude_status", status, EXCLUDABLE)
    for contradiction in (_group_size, _kl_in_loss, _filter, _overlong, _two_bounds):
        message = contradiction(algorithm)
        if message is not None:
            raise ConfigError(message)


def _group_size(algorithm: Algorithm) -> str | None:
    if algorithm.samples_per_prompt >= 2:
        return None
    found = f"train.samples_per_prompt={algorithm.samples_per_prompt}"
    if algorithm.estimator.group:
        return (
            f"{found}: advantage {algorithm.advantage} compares the members of a group; use "
            "train.samples_per_prompt=8, or algorithm.preset=reinforce_pp"
        )
    if algorithm.filter.dynamic:
        return (
            f"{found}: one outcome is always constant, so algorithm.filter.dynamic would keep no "
            "group; use train.samples_per_prompt=8, or algorithm.filter.dynamic=false"
        )
    return None


def _kl_in_loss(algorithm: Algorithm) -> str | None:
    if not algorithm.kl_in_loss or algorithm.divergence.in_loss:
        return None
    return (
        f"algorithm.kl.kind={algorithm.kl.kind}: in the loss its gradient does not lead to the "
        "reference; use algorithm.kl.kind=k1+ or k3, or algorithm.kl.place=reward"
    )


def _filter(algorithm: Algorithm) -> str | None:
    low, high = algorithm.filter.low, algorithm.filter.high
    if low < high:
        return None
    return (
        f"algorithm.filter.low={low:g} is not below algorithm.filter.high={high:g}, so no group "
        "could be kept; use algorithm.filter.low=0.01 algorithm.filter.high=0.99"
    )


def _overlong(algorithm: Algorithm) -> str | None:
    buffer, limit = algorithm.overlong.buffer, algorithm.overlong.max_tokens
    if buffer >= limit:
        return (
            f"algorithm.overlong.buffer={buffer} must be below the longest response of {limit} "
            f"tokens; use algorithm.overlong.buffer={limit // 5}"
        )
    if buffer and "truncated" in algorithm.exclude_status:
        return (
            "algorithm.exclude_status=[truncated] leaves out what algorithm.overlong punishes; "
            "use algorithm.overlong.buffer=0, or algorithm.exclude_status=[]"
        )
    return None


def _two_bounds(algorithm: Algorithm) -> str | None:
    dual_clip, delta = algorithm.loss_options.dual_clip, algorithm.loss_options.delta
    if dual_clip is None or delta is None:
        return None
    return (
        f"algorithm.delta={delta:g} bounds the same loss as algorithm.dual_clip={dual_clip:g}, so "
        "one of them has no effect; keep algorithm.dual_clip=3 and remove algorithm.delta"
    )


# -- options without effect ------------------------------------------------------------------------


def refuse_unused(config: AlgorithmConfig, algorithm: Algorithm) -> None:
    """An option that is set and would do nothing is a misunderstanding."""
    _refuse_unread(config, algorithm)
    for names, works, reason, remedy in CONDITIONS:
        for name in names:
            if not works(algorithm) and _value(config, name) is not None:
                raise _unused(name, reason.format(a=algorithm), remedy)


def _refuse_unread(config: AlgorithmConfig, algorithm: Algorithm) -> None:
    chosen = {
        "advantage": algorithm.estimator,
        "policy_loss": algorithm.loss,
        "aggregation": algorithm.aggregate,
    }
    for axis, entry in chosen.items():
        for option in AlgorithmConfig.model_fields:
            readers = [name for name, other in AXES[axis].items() if other.reads(option)]
            if readers and not entry.reads(option) and _value(config, option) is not None:
                reason = f"{axis} {getattr(algorithm, axis)} does not read it"
                raise _unused(option, reason, f"algorithm.{axis}={readers[0]}")


# options, when they have an effect, why not otherwise, what gives them one
CONDITIONS: list[tuple[tuple[str, ...], Callable[[Algorithm], bool], str, str]] = [
    (
        ("kl.kind", "kl.place", "kl.clamp"),
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
        ("filter.low", "filter.high", "filter.max_rounds", "filter.on_exhausted"),
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
        "algorithm.advantage=grpo",
    ),
    (
        ("excluded_in_baseline",),
        lambda a: bool(a.exclude_status),
        "exclude_status is empty",
        "algorithm.exclude_status=[overturn]",
    ),
]


def _value(config: AlgorithmConfig, name: str) -> object:
    return reduce(getattr, name.split("."), config)


def _unused(option: str, reason: str, remedy: str) -> ConfigError:
    return ConfigError(
        f"algorithm.{option} is set but has no effect: {reason}; remove it, or use {remedy}"
    )


# -- legal, but rarely meant -----------------------------------------------------------------------


def find_warnings(algorithm: Algorithm) -> tuple[str, ...]:
    found = []
    own = algorithm.loss.own_aggregation
    if own is not None and algorithm.aggregation != own:
        found.append(
            f"algorithm.aggregation={algorithm.aggregation}: policy loss {algorithm.policy_loss} "
            f"is made for {own}; long sequences weigh more now"
        )
    delta, high = algorithm.loss_options.delta, 1 + algorithm.loss_options.clip_high
    if delta is not None and delta <= high:
        found.append(
            f"algorithm.delta={delta:g} is not above 1 + clip_high = {high:g} and cuts ratios "
            "inside the clip; algorithm.delta=4 is usual"
        )
    return tuple(found)
