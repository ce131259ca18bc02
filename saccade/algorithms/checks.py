"""What a resolved algorithm must not be: contradictory.

Every refusal names the field, the reason and a value that works. Imports no torch.

    >>> refuse_contradictions(algorithm)   # raises ConfigError, or nothing
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from saccade.algorithms.algorithm_state import LARGEST_ERROR
from saccade.algorithms.filters import EXCLUDABLE
from saccade.algorithms.resolved_algorithm import Algorithm
from saccade.algorithms.table import unknown
from saccade.config.schema import AlgorithmConfig
from saccade.errors import ConfigError


def refuse_contradictions(algorithm: Algorithm) -> None:
    for status in algorithm.exclude_status:
        if status not in EXCLUDABLE:
            raise unknown("algorithm.exclude_status", status, EXCLUDABLE)
    for contradiction in CONTRADICTIONS:
        message = contradiction(algorithm)
        if message is not None:
            raise ConfigError(message)


def _required(algorithm: Algorithm) -> str | None:
    """Functions of your own may have options without a default."""
    kl = (algorithm.kl.kind, algorithm.divergence, algorithm.kl_options)
    for axis, (name, entry, options) in {**algorithm.axes, "kl.kind": kl}.items():
        missing = [option for option in entry.required if options[option] is None]
        if missing:
            return f"algorithm.{axis}={name} needs {' and '.join(missing)}; {example(missing)}"
    return None


def example(options: Sequence[str]) -> str:
    """How the options are given; what they should be only their function knows."""
    fields = [f"algorithm.{name}=1" for name in options if name in AlgorithmConfig.model_fields]
    args = ", ".join(f"{name}: 1" for name in options if name not in AlgorithmConfig.model_fields)
    return "for example " + " ".join(fields + ([f"algorithm.args={{{args}}}"] if args else []))


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
    buffer, limit = algorithm.overlong.buffer, algorithm.max_tokens
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


def _bounds(algorithm: Algorithm) -> str | None:
    dual_clip = algorithm.loss_options.get("dual_clip", 0)
    delta = algorithm.loss_options.get("delta", 0)
    for name, value in (("dual_clip", dual_clip), ("delta", delta)):
        if 0 < value <= 1:
            return f"algorithm.{name}={value:g} must be above 1, or 0; use algorithm.{name}=3"
    floor, cap = (algorithm.loss_options.get(f"weight_{name}", 0) for name in ("floor", "cap"))
    if floor and floor >= cap:
        return (
            f"algorithm.args.weight_floor={floor:g} is not below weight_cap={cap:g}; use algorithm.args.weight_floor=0"
        )
    if dual_clip and delta:
        return (
            f"algorithm.delta={delta:g} bounds the same loss as algorithm.dual_clip={dual_clip:g}, "
            "so one of them has no effect; keep algorithm.dual_clip=3 and set algorithm.delta=0"
        )
    return None


def _ranges(algorithm: Algorithm) -> str | None:
    for name, (low, high), works in (
        ("entropy_range", algorithm.entropy_range, "[0,0.05]"),
        ("reward_range", algorithm.reward_range, "[0,1]"),
    ):
        if low >= high:
            return f"algorithm.{name}: {low:g} is not below {high:g}; use algorithm.{name}={works}"
    return None


def _entropy(algorithm: Algorithm) -> str | None:
    coef, (low, high) = algorithm.entropy_coef, algorithm.entropy_range
    if algorithm.entropy_target and coef and not low <= coef <= high:
        return (
            f"algorithm.entropy_coef={coef:g} is outside algorithm.entropy_range="
            f"[{low:g},{high:g}], in which it is steered; use algorithm.entropy_coef={low:g}"
        )
    return None


def _short_horizon(algorithm: Algorithm) -> str | None:
    sequences, horizon = algorithm.sequences, algorithm.kl.horizon
    adaptive = algorithm.needs_reference and algorithm.kl.controller == "adaptive"
    if not adaptive or LARGEST_ERROR * sequences < horizon:
        return None
    return (
        f"algorithm.kl.horizon={horizon:g} is so short that the {sequences} sequences of a step "
        f"could turn the coefficient to 0; use algorithm.kl.horizon={10 * sequences}"
    )


def _negative_rewards(algorithm: Algorithm) -> str | None:
    """Of an estimator that divides by the mean reward."""
    if not algorithm.estimator.positive:
        return None
    causes = {
        "algorithm.kl.place=reward": (algorithm.kl_in_reward, "algorithm.kl.place=loss"),
        "reward.running_norm=mean_std": (algorithm.reward_normalise == "mean_std", "reward.running_norm=std"),
        "algorithm.overlong": (algorithm.overlong.buffer > 0, "algorithm.overlong.buffer=0"),
    }
    for cause, (present, remedy) in causes.items():
        if present:
            return (
                f"{cause} can make a reward negative, and advantage {algorithm.advantage} needs "
                f"rewards >= 0; use {remedy}, or algorithm.advantage=grpo"
            )
    return None


def _corrections(algorithm: Algorithm) -> str | None:
    weighing = [c.name for c in algorithm.corrections if c.entry.weighs]
    if len(weighing) > 1:
        return (
            f"algorithm.correct: {' and '.join(weighing)} both weigh tokens for the same gap; keep "
            f"one, such as algorithm.correct=[{weighing[0]}]"
        )
    for correction in algorithm.corrections:
        if correction.entry.by_sequence and algorithm.loss.applies_weights:
            return (
                f"algorithm.correct: policy loss {algorithm.policy_loss} multiplies the weights of "
                f"all tokens of a sequence, and {correction.name} gives each of them the weight of "
                "the whole; use algorithm.correct=[tis.token]"
            )
        low, high = correction.options.get("low", 0), correction.options.get("high", 1 << 30)
        if low >= high:
            return (
                f"algorithm.correct: {correction.name} has low={low:g}, not below high={high:g}; "
                f"use algorithm.correct=[{{name: {correction.name}, low: 0.97, high: 1.03}}]"
            )
    return None


def _kl_damp(algorithm: Algorithm) -> str | None:
    if algorithm.advantage_options.get("drpo_kl_damp") and not algorithm.needs_reference:
        return (
            "algorithm.args.drpo_kl_damp measures the distance to a reference and kl.coef is 0; "
            "use algorithm.kl.coef=1e-4, or algorithm.args.drpo_kl_damp=0"
        )
    return None


def _normalised_components(algorithm: Algorithm) -> str | None:
    if algorithm.estimator.components and algorithm.kl_in_reward:
        return (
            f"algorithm.kl.place=reward: advantage {algorithm.advantage} compares the terms of the "
            "reward one by one and a KL is none of them; use algorithm.kl.place=loss"
        )
    return None


CONTRADICTIONS: tuple[Callable[[Algorithm], str | None], ...] = (
    _required,
    _group_size,
    _kl_in_loss,
    _filter,
    _overlong,
    _bounds,
    _ranges,
    _entropy,
    _short_horizon,
    _negative_rewards,
    _corrections,
    _kl_damp,
    _normalised_components,
)


def find_warnings(algorithm: Algorithm) -> tuple[str, ...]:
    found = []
    own = algorithm.loss.own_aggregation
    if own is not None and algorithm.aggregation != own:
        found.append(
            f"algorithm.aggregation={algorithm.aggregation}: policy loss {algorithm.policy_loss} "
            f"is made for {own}; long sequences weigh more now"
        )
    options = algorithm.loss_options
    delta, high = options.get("delta", 0), 1 + options.get("clip_high", 0)
    if 0 < delta <= high:
        found.append(
            f"algorithm.delta={delta:g} is not above 1 + clip_high = {high:g} and cuts ratios "
            "inside the clip; algorithm.delta=4 is usual"
        )
    return tuple(found)
