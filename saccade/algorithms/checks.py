"""What a resolved algorithm must not be: contradictory.

Every refusal names the field, the reason and a value that works. Imports no torch.

    >>> refuse_contradictions(algorithm)   # raises ConfigError, or nothing
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from saccade.algorithms.algorithm_state import LARGEST_ERROR
from saccade.algorithms.filters import EXCLUDABLE
from saccade.algorithms.resolved_algorithm import Algorithm
from saccade.config.schema import AlgorithmConfig
from saccade.config.schema.presets import unknown
from saccade.errors import ConfigError


def refuse_contradictions(algorithm: Algorithm) -> None:
    for status in algorithm.exclude_status:
        if status not in EXCLUDABLE:
            raise unknown("algorithm.exclude_status", status, EXCLUDABLE)
    for contradictions in (_functions, _numbers, _rewards, _corrections):
        for message in contradictions(algorithm):
            raise ConfigError(message)


def _functions(algorithm: Algorithm) -> Iterator[str]:
    """What the chosen functions need."""
    kl = (algorithm.kl.kind, algorithm.divergence, algorithm.kl_options)
    for axis, (name, entry, options) in {**algorithm.axes, "kl.kind": kl}.items():
        if missing := [option for option in entry.required if options[option] is None]:
            yield f"algorithm.{axis}={name} needs {' and '.join(missing)}; {example(missing)}"
    found = f"train.samples_per_prompt={algorithm.samples_per_prompt}"
    if algorithm.samples_per_prompt < 2 and algorithm.estimator.group:
        yield (
            f"{found}: advantage {algorithm.advantage} compares the members of a group; use "
            "train.samples_per_prompt=8, or algorithm.preset=reinforce_pp"
        )
    if algorithm.samples_per_prompt < 2 and algorithm.filter.dynamic:
        yield (
            f"{found}: one outcome is always constant, so algorithm.filter.dynamic would keep no "
            "group; use train.samples_per_prompt=8, or algorithm.filter.dynamic=false"
        )
    if algorithm.kl_in_loss and not algorithm.divergence.in_loss:
        yield (
            f"algorithm.kl.kind={algorithm.kl.kind}: in the loss its gradient does not lead to the "
            "reference; use algorithm.kl.kind=k1+ or k3, or algorithm.kl.place=reward"
        )


def example(options: Sequence[str]) -> str:
    """How the options are given; what they should be only their function knows."""
    fields = [f"algorithm.{name}=1" for name in options if name in AlgorithmConfig.model_fields]
    args = ", ".join(f"{name}: 1" for name in options if name not in AlgorithmConfig.model_fields)
    return "for example " + " ".join(fields + ([f"algorithm.args={{{args}}}"] if args else []))


def _numbers(algorithm: Algorithm) -> Iterator[str]:
    options, sequences, horizon = algorithm.loss_options, algorithm.sequences, algorithm.kl.horizon
    if algorithm.filter.low >= algorithm.filter.high:
        yield (
            f"algorithm.filter.low={algorithm.filter.low:g} is not below algorithm.filter.high="
            f"{algorithm.filter.high:g}; use algorithm.filter.low=0.01 algorithm.filter.high=0.99"
        )
    low, high = options.get("weight_floor", 0), options.get("weight_cap", 0)
    if low and low >= high:
        yield f"algorithm.args.weight_floor={low:g} is not below weight_cap={high:g}; use algorithm.args.weight_floor=0"
    for name, works in (("entropy_range", "[0,0.05]"), ("reward_range", "[0,1]")):
        low, high = getattr(algorithm, name)
        if low >= high:
            yield f"algorithm.{name}: {low:g} is not below {high:g}; use algorithm.{name}={works}"
    dual_clip, delta = options.get("dual_clip", 0), options.get("delta", 0)
    for name, value in (("dual_clip", dual_clip), ("delta", delta)):
        if 0 < value <= 1:
            yield f"algorithm.{name}={value:g} must be above 1, or 0; use algorithm.{name}=3"
    if dual_clip and delta:
        yield (
            f"algorithm.delta={delta:g} bounds the same loss as algorithm.dual_clip={dual_clip:g}; "
            "keep algorithm.dual_clip=3 and set algorithm.delta=0"
        )
    coef, (low, high) = algorithm.entropy_coef, algorithm.entropy_range
    if algorithm.entropy_target and coef and not low <= coef <= high:
        yield (
            f"algorithm.entropy_coef={coef:g} is outside algorithm.entropy_range=[{low:g},{high:g}], "
            f"in which it is steered; use algorithm.entropy_coef={low:g}"
        )
    adaptive = algorithm.needs_reference and algorithm.kl.controller == "adaptive"
    if adaptive and LARGEST_ERROR * sequences >= horizon:
        yield (
            f"algorithm.kl.horizon={horizon:g} is so short that the {sequences} sequences of a step "
            f"could turn the coefficient to 0; use algorithm.kl.horizon={10 * sequences}"
        )


def _rewards(algorithm: Algorithm) -> Iterator[str]:
    buffer, limit = algorithm.overlong.buffer, algorithm.max_tokens
    if buffer >= limit:
        yield (
            f"algorithm.overlong.buffer={buffer} must be below the longest response of {limit} "
            f"tokens; use algorithm.overlong.buffer={limit // 5}"
        )
    if buffer and "truncated" in algorithm.exclude_status:
        yield (
            "algorithm.exclude_status=[truncated] leaves out what algorithm.overlong punishes; "
            "use algorithm.overlong.buffer=0, or algorithm.exclude_status=[]"
        )
    negative = {
        "algorithm.kl.place=reward": (algorithm.kl_in_reward, "algorithm.kl.place=loss"),
        "reward.running_norm=mean_std": (algorithm.reward_normalise == "mean_std", "reward.running_norm=std"),
        "algorithm.overlong": (buffer > 0, "algorithm.overlong.buffer=0"),
    }
    for cause, (present, remedy) in negative.items():
        if present and algorithm.estimator.positive:
            yield (
                f"{cause} can make a reward negative, and advantage {algorithm.advantage} needs "
                f"rewards >= 0; use {remedy}, or algorithm.advantage=grpo"
            )
    if algorithm.advantage_options.get("drpo_kl_damp") and not algorithm.needs_reference:
        yield (
            "algorithm.args.drpo_kl_damp measures the distance to a reference and kl.coef is 0; "
            "use algorithm.kl.coef=1e-4, or algorithm.args.drpo_kl_damp=0"
        )
    if algorithm.estimator.components and algorithm.kl_in_reward:
        yield (
            f"algorithm.kl.place=reward: advantage {algorithm.advantage} compares the terms of the "
            "reward one by one and a KL is none of them; use algorithm.kl.place=loss"
        )


def _corrections(algorithm: Algorithm) -> Iterator[str]:
    weighing = [c.name for c in algorithm.corrections if c.entry.weighs]
    if len(weighing) > 1:
        yield (
            f"algorithm.correct: {' and '.join(weighing)} both weigh tokens for the same gap; keep "
            f"one, such as algorithm.correct=[{weighing[0]}]"
        )
    for correction in algorithm.corrections:
        if correction.entry.by_sequence and algorithm.loss.applies_weights:
            yield (
                f"algorithm.correct: policy loss {algorithm.policy_loss} multiplies the weights of all tokens, "
                f"and {correction.name} gives each the weight of the whole; use algorithm.correct=[tis.token]"
            )
        low, high = correction.options.get("low", 0), correction.options.get("high", 1 << 30)
        if low >= high:
            yield (
                f"algorithm.correct: {correction.name} has low={low:g}, not below high={high:g}; "
                f"use algorithm.correct=[{{name: {correction.name}, low: 0.97, high: 1.03}}]"
            )


def find_warnings(algorithm: Algorithm) -> tuple[str, ...]:
    found, own, options = [], algorithm.loss.own_aggregation, algorithm.loss_options
    if own is not None and algorithm.aggregation != own:
        found.append(
            f"algorithm.aggregation={algorithm.aggregation}: policy loss {algorithm.policy_loss} "
            f"is made for {own}; long sequences weigh more now"
        )
    delta, high = options.get("delta", 0), 1 + options.get("clip_high", 0)
    if 0 < delta <= high:
        found.append(
            f"algorithm.delta={delta:g} is not above 1 + clip_high = {high:g} and cuts ratios "
            "inside the clip; algorithm.delta=4 is usual"
        )
    return tuple(found)
