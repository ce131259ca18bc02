"""What a resolved algorithm must not be: contradictory.

Every refusal names the field, the reason and a value that works. Imports no torch.

    >>> refuse_contradictions(algorithm)   # raises ConfigError, or nothing
"""

from __future__ import annotations

from saccade.algorithms.algorithm_state import LARGEST_ERROR
from saccade.algorithms.filters import EXCLUDABLE
from saccade.algorithms.resolved_algorithm import Algorithm
from saccade.config.schema.presets import unknown
from saccade.errors import ConfigError


def refuse_contradictions(algorithm: Algorithm) -> None:
    for status in algorithm.exclude_status:
        if status not in EXCLUDABLE:
            raise unknown("algorithm.exclude_status", status, EXCLUDABLE)
    for name, low, high, works in _bounds(algorithm):
        if low >= high:
            raise ConfigError(f"algorithm.{name}: {low:g} is not below {high:g}; use algorithm.{works}")
    for message, holds in _contradictions(algorithm).items():
        if holds:
            raise ConfigError(message)


def _bounds(algorithm: Algorithm) -> list[tuple[str, float, float, str]]:
    """Options with a lower and an upper bound: the name, both, and what works."""
    limits, options = algorithm.filter, algorithm.loss.options
    found = [
        ("filter.low", limits.low, limits.high, "filter.low=0.01 algorithm.filter.high=0.99"),
        ("entropy_range", *algorithm.entropy_range, "entropy_range=[0,0.05]"),
        ("reward_range", *algorithm.reward_range, "reward_range=[0,1]"),
    ]
    if options.get("weight_floor"):
        found.append(("args.weight_floor", options["weight_floor"], options["weight_cap"], "args.weight_floor=0"))
    for one in algorithm.corrections:
        if one.reads("low") and one.reads("high"):
            works = f"correct=[{{name: {one.name}, low: 0.97, high: 1.03}}]"
            found.append((f"correct: {one.name}", one.options["low"], one.options["high"], works))
    return found


def _contradictions(a: Algorithm) -> dict[str, bool]:
    """What would be said, and whether it is so."""
    few, kl, buffer, sequences = a.samples_per_prompt < 2, a.kl, a.overlong.buffer, a.sequences
    dual_clip, delta = a.loss.options.get("dual_clip") or 0, a.loss.options.get("delta") or 0
    weighing = [c.name for c in a.corrections if c.weighs]
    adaptive = a.needs_reference and kl.controller == "adaptive"
    coef, (low, high) = a.entropy_coef, a.entropy_range
    return {
        f"train.samples_per_prompt={a.samples_per_prompt}: advantage {a.advantage} compares the members of a group; "
        "use train.samples_per_prompt=8, or algorithm.preset=reinforce_pp": few and a.estimator.group,
        "algorithm.filter.dynamic would keep no group, as one outcome is always constant; use "
        "train.samples_per_prompt=8, or algorithm.filter.dynamic=false": few and a.filter.dynamic,
        f"algorithm.kl.kind={kl.kind}: in the loss its gradient does not lead to the reference; use "
        "algorithm.kl.kind=k1+ or k3, or algorithm.kl.place=reward": a.kl_in_loss and not a.divergence.in_loss,
        f"algorithm.dual_clip={dual_clip:g} must be above 1, or 0; use algorithm.dual_clip=3": 0 < dual_clip <= 1,
        f"algorithm.delta={delta:g} must be above 1, or 0; use algorithm.delta=3": 0 < delta <= 1,
        f"algorithm.delta={delta:g} bounds the same loss as algorithm.dual_clip={dual_clip:g}; use "
        "algorithm.dual_clip=3 algorithm.delta=0": bool(dual_clip and delta),
        f"algorithm.kl.horizon={kl.horizon:g} is so short that the {sequences} sequences of a step could turn the "
        f"coefficient to 0; use algorithm.kl.horizon={10 * sequences}": adaptive
        and LARGEST_ERROR * sequences >= kl.horizon,
        f"algorithm.overlong.buffer={buffer} must be below the longest response of {a.max_tokens} tokens; use "
        f"algorithm.overlong.buffer={a.max_tokens // 5}": buffer >= a.max_tokens,
        "algorithm.exclude_status=[truncated] leaves out what algorithm.overlong punishes; use "
        "algorithm.overlong.buffer=0, or algorithm.exclude_status=[]": buffer > 0 and "truncated" in a.exclude_status,
        f"algorithm.entropy_coef={coef:g} is outside algorithm.entropy_range=[{low:g},{high:g}], in which it is "
        f"steered; use algorithm.entropy_coef={low:g}": bool(a.entropy_target and coef) and not low <= coef <= high,
        f"algorithm.advantage={a.advantage} needs rewards >= 0; use algorithm.kl.place=loss "
        "algorithm.overlong.buffer=0 reward.running_norm=std, or algorithm.advantage=grpo": a.estimator.positive
        and (a.kl_in_reward or buffer > 0 or a.reward_normalise == "mean_std"),
        "algorithm.args.drpo_kl_damp measures the distance to a reference; use algorithm.kl.coef=1e-4": bool(
            a.estimator.options.get("drpo_kl_damp") and not a.needs_reference
        ),
        f"algorithm.kl.place=reward: advantage {a.advantage} compares the terms of the reward, and a KL is none of "
        "them; use algorithm.kl.place=loss": a.estimator.components and a.kl_in_reward,
        f"algorithm.correct: {' and '.join(weighing)} both weigh tokens for the same gap; keep one, such as "
        f"algorithm.correct=[{''.join(weighing[:1])}]": len(weighing) > 1,
        f"algorithm.correct: policy loss {a.policy_loss} multiplies the weights of all tokens, so each must be that "
        "of the token; use algorithm.correct=[tis.token]": a.loss.applies_weights
        and any(c.by_sequence for c in a.corrections),
    }
