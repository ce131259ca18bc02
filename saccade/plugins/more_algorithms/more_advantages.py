"""Estimators of advantages beside the usual ones. Axes: S members (sequences), T policy tokens.

>>> compute(ADVANTAGES["max_rl"], inputs).values
tensor([ 1.0000,  1.0000, -1.0000], dtype=torch.float64)
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from saccade.algorithms.advantages import INFINITY, AdvantageInputs, count_groups, grpo, no_std, standardised, whitened
from saccade.algorithms.filters import is_constant
from saccade.algorithms.table import Entry, Positive, ShareBelowOne, add
from saccade.errors import ConfigError
from saccade.plugins.more_algorithms.domains import observe, weigh

if TYPE_CHECKING:
    from torch import Tensor

ROWS: dict[str, Entry] = {}


@add(ROWS, "(R - mean_g) / (std of the step + std_eps)", group=True)
def batch_std(inputs: AdvantageInputs, *, std_eps: float = 1e-6) -> Tensor:
    return inputs.per_token(inputs.centred / _divisor(inputs.scores[inputs.live], std_eps))


@add(ROWS, "R - length-weighted mean_g", group=True)
def opo(inputs: AdvantageInputs) -> Tensor:
    """The baseline of least variance weighs members by length (arXiv 2505.23585)."""
    lengths = inputs.lengths.to(inputs.scores)
    baseline = inputs.group_sum(lengths * inputs.scores) / inputs.group_sum(lengths).clamp(min=1)
    return inputs.per_token(inputs.scores - baseline)


@add(ROWS, "alpha (R - mean_g), alpha = live members / those in groups that differ", group=True)
def gpg(
    inputs: AdvantageInputs,
    *,
    gpg_alpha: Literal["nonconstant", "nonzero_rewards"] = "nonconstant",
    gpg_alpha_max: Positive = INFINITY,
    gpg_divisor: Literal["one", "std"] = "one",
    std_eps: float = 1e-6,
) -> Tensor:
    """Scaled up for members that carry no signal (arXiv 2504.02546)."""
    carries = {"nonconstant": ~inputs.constant, "nonzero_rewards": inputs.rewards != 0}[gpg_alpha]
    alpha = inputs.live.sum().double() / (carries & inputs.live).sum().clamp(min=1)
    signal = standardised(inputs, std_eps) if gpg_divisor == "std" else inputs.centred
    return inputs.per_token(signal * alpha.clamp(max=gpg_alpha_max))


@add(ROWS, "(R - mean_g) / mean_g, 0 where mean_g <= 0", group=True, positive=True)
def max_rl(inputs: AdvantageInputs) -> Tensor:
    """arXiv 2602.02710"""
    if bool((inputs.scores < 0).any()):
        raise ConfigError(
            "algorithm.advantage=max_rl divides by the mean reward and needs rewards >= 0, a KL in "
            "the reward included; use algorithm.advantage=grpo, or rewards without negative parts"
        )
    mean = inputs.group_mean
    return inputs.per_token((inputs.centred / mean).where(mean > 0, 0.0))


@add(ROWS, "best member: (R_1 - R_2) / (std_g + std_eps); others 0", group=True)
def grpo_passk(inputs: AdvantageInputs, *, std_eps: float = 1e-6, divide_by_std: bool = True) -> Tensor:
    """Only the best member of a group, by its lead over the second (arXiv 2503.19595)."""
    scores, order = inputs.scores, inputs.scores.new_ones(len(inputs.scores)).cumsum(0)
    leads = scores == inputs.group_max(scores)
    first = order == -inputs.group_max((-order).where(leads, -INFINITY))
    second = inputs.group_max(scores.where(~first, -INFINITY))
    divisor = inputs.group_std + std_eps if divide_by_std else 1.0
    return inputs.per_token(((scores - second) / divisor).where(first, 0.0))


@add(ROWS, "(R - mean_g) / (std_g + std_eps), or times groups / groups that differ", group=True)
def cpgd(
    inputs: AdvantageInputs, *, cpgd_weight: Literal["std", "clip_filter", "none"] = "std", std_eps: float = 1e-6
) -> Tensor:
    """arXiv 2505.12504; `clip_filter` makes up for groups without a signal, at most threefold."""
    if cpgd_weight == "std":
        return grpo(inputs, std_eps=std_eps)
    if cpgd_weight == "none":
        return no_std(inputs)
    groups = count_groups(inputs.groups[inputs.live])
    differing = count_groups(inputs.groups[inputs.live & ~inputs.constant])
    return inputs.per_token(inputs.centred * min(groups / max(differing, 1), 3.0))


@add(ROWS, "sum over terms of v (r - mean_g) / (std_g + std_eps), whitened over the step", group=True, components=True)
def gdpo(inputs: AdvantageInputs, *, std_eps: float = 1e-6, gdpo_whiten: Literal["seq", "token"] = "seq") -> Tensor:
    """Each term of the reward on its own scale (arXiv 2601.05242); a KL belongs in the loss."""
    assert inputs.components is not None and inputs.component_weights is not None
    total = inputs.scores.new_zeros(len(inputs.scores))
    weights = inputs.component_weights.expand_as(inputs.components)
    for rewards, factor in zip(inputs.components.T, weights.T, strict=True):
        total += factor * standardised(replace(inputs, rewards=rewards), std_eps)
    live = inputs.per_token(inputs.live)
    if gdpo_whiten == "token":
        return whitened(inputs.per_token(total), live)
    inside = total[inputs.live]
    return inputs.per_token((total - inside.mean()) / _divisor(inside, 1e-4)).where(live, 0.0)


@add(ROWS, "w_domain (R - mean_g) / (std_g + std_eps) / std of the step", group=True, observe=observe, weigh=weigh)
def drpo(
    inputs: AdvantageInputs,
    *,
    std_eps: float = 1e-6,
    drpo_renorm: Literal["std", "rms"] = "std",
    drpo_kl_damp: ShareBelowOne = 0.0,
) -> Tensor:
    """Rare and hard domains weigh more (after arXiv 2506.00711).

    `drpo_kl_damp` is a quantile of |A| times the drift from the reference, such as 0.75: a member
    at it gets half its advantage.
    """
    assert inputs.domain_weights is not None
    carries = inputs.live & ~inputs.constant
    counted = carries.to(inputs.scores)
    once = counted / inputs.group_sum(counted).clamp(min=1)  # each group, whatever its size
    typical = (inputs.domain_weights.where(carries, 0.0) * once).sum() / once.sum()
    weights = (inputs.domain_weights / typical).clamp(0.1, 10).where(carries, 1.0)

    plain = standardised(inputs, std_eps)
    weighted, live = plain * weights, inputs.live
    if not bool(weighted[live].any()):
        return inputs.per_token(weighted)
    if drpo_renorm == "std":
        weighted = weighted / _divisor(weighted[live], 1e-6)
    else:
        weighted = weighted * plain[live].norm() / weighted[live].norm()
    if drpo_kl_damp > 0:
        assert inputs.drift is not None
        strain = weighted.abs() * inputs.drift
        limit = strain[live].quantile(drpo_kl_damp)
        if limit > 0:  # at 0 most members do not strain, and the formula would erase the rest
            weighted = weighted * limit / (strain + limit)
    return inputs.per_token(weighted)


def _divisor(values: Tensor, eps: float) -> Tensor | float:
    """Std + eps; 1 for a lone value or equal ones, which eps alone would blow up."""
    return values.std() + eps if len(values) > 1 and not is_constant(values.tolist()) else 1.0
