"""Rewards become advantages, over whole groups of a whole step, in float64 on the CPU.

An estimator is `f(inputs, *, options) -> [T]`. What holds for all of them is done once, in
`compute`: a group shrunk to one member does not train, a constant group gets exactly 0, whitening
happens at most once, the clip comes last. Knows nothing of losses, masks or how rewards were made.
Axes: S members (sequences), T policy tokens.

    >>> compute(ADVANTAGES["grpo"], inputs, {"std_eps": 1e-4}).values
    tensor([ 0.7070,  0.7070, -0.7070], dtype=torch.float64)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from saccade.algorithms.advantage_inputs import INFINITY, AdvantageInputs
from saccade.algorithms.filters import is_constant
from saccade.algorithms.table import Entry, Positive, Share, ShareBelowOne, bound
from saccade.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

# -- one number per member -------------------------------------------------------------------------


def grpo(inputs: AdvantageInputs, *, std_eps: float = 1e-6) -> Tensor:
    """arXiv 2402.03300"""
    return inputs.per_token(_standardised(inputs, std_eps))


def no_std(inputs: AdvantageInputs) -> Tensor:
    """Dr. GRPO, arXiv 2503.20783: without a divisor easy and hard prompts weigh as their spread."""
    return inputs.per_token(inputs.centred)


def batch_std(inputs: AdvantageInputs, *, std_eps: float = 1e-6) -> Tensor:
    return inputs.per_token(inputs.centred / _divisor(inputs.scores[inputs.live], std_eps))


def rloo(inputs: AdvantageInputs) -> Tensor:
    """arXiv 2402.14740"""
    others = (inputs.group_size - 1).clamp(min=1)
    baseline = (inputs.group_sum(inputs.scores) - inputs.scores) / others
    return inputs.per_token(inputs.scores - baseline)


def opo(inputs: AdvantageInputs) -> Tensor:
    """The baseline of least variance weighs members by length (arXiv 2505.23585)."""
    lengths = inputs.lengths.to(inputs.scores)
    baseline = inputs.group_sum(lengths * inputs.scores) / inputs.group_sum(lengths).clamp(min=1)
    return inputs.per_token(inputs.scores - baseline)


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
    signal = _standardised(inputs, std_eps) if gpg_divisor == "std" else inputs.centred
    return inputs.per_token(signal * alpha.clamp(max=gpg_alpha_max))


def max_rl(inputs: AdvantageInputs) -> Tensor:
    """arXiv 2602.02710"""
    if bool((inputs.scores < 0).any()):
        raise ConfigError(
            "algorithm.advantage=max_rl divides by the mean reward and needs rewards >= 0, a KL in "
            "the reward included; use algorithm.advantage=grpo, or rewards without negative parts"
        )
    mean = inputs.group_mean
    return inputs.per_token((inputs.centred / mean).where(mean > 0, 0.0))


def grpo_passk(inputs: AdvantageInputs, *, std_eps: float = 1e-6, divide_by_std: bool = True) -> Tensor:
    """Only the best member of a group, by its lead over the second (arXiv 2503.19595)."""
    scores, order = inputs.scores, inputs.scores.new_ones(len(inputs.scores)).cumsum(0)
    leads = scores == inputs.group_max(scores)
    first = order == -inputs.group_max((-order).where(leads, -INFINITY))
    second = inputs.group_max(scores.where(~first, -INFINITY))
    divisor = inputs.group_std + std_eps if divide_by_std else 1.0
    return inputs.per_token(((scores - second) / divisor).where(first, 0.0))


def cpgd(
    inputs: AdvantageInputs, *, cpgd_weight: Literal["std", "clip_filter", "none"] = "std", std_eps: float = 1e-6
) -> Tensor:
    """arXiv 2505.12504; `clip_filter` makes up for groups without a signal, at most threefold."""
    if cpgd_weight == "std":
        return grpo(inputs, std_eps=std_eps)
    if cpgd_weight == "none":
        return no_std(inputs)
    groups = _count_groups(inputs.groups[inputs.live])
    differing = _count_groups(inputs.groups[inputs.live & ~inputs.constant])
    return inputs.per_token(inputs.centred * min(groups / max(differing, 1), 3.0))


def gdpo(inputs: AdvantageInputs, *, std_eps: float = 1e-6, gdpo_whiten: Literal["seq", "token"] = "seq") -> Tensor:
    """Each term of the reward on its own scale (arXiv 2601.05242); a KL belongs in the loss."""
    assert inputs.components is not None and inputs.component_weights is not None
    total = inputs.scores.new_zeros(len(inputs.scores))
    weights = inputs.component_weights.expand_as(inputs.components)
    for rewards, weight in zip(inputs.components.T, weights.T, strict=True):
        total += weight * _standardised(replace(inputs, rewards=rewards), std_eps)
    live = inputs.per_token(inputs.live)
    if gdpo_whiten == "token":
        return whitened(inputs.per_token(total), live)
    inside = total[inputs.live]
    return inputs.per_token((total - inside.mean()) / _divisor(inside, 1e-4)).where(live, 0.0)


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

    plain = _standardised(inputs, std_eps)
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


# -- one number per token --------------------------------------------------------------------------


def returns(inputs: AdvantageInputs, *, gamma: float = 1.0) -> Tensor:
    return inputs.sum_from(inputs.token_rewards, gamma)


def remax(inputs: AdvantageInputs) -> Tensor:
    """arXiv 2310.10505"""
    assert inputs.greedy is not None
    return returns(inputs) - inputs.per_token(inputs.greedy)


def gae(inputs: AdvantageInputs, *, gamma: float = 1.0, lam: Share = 0.95) -> Tensor:
    """arXiv 1506.02438"""
    assert inputs.values is not None
    final = inputs.final_values
    end = inputs.values.new_zeros(()) if final is None else inputs.per_token(final)
    following = inputs.values.roll(-1).where(~inputs.ends, end)
    surprise = inputs.token_rewards + gamma * following - inputs.values
    return inputs.sum_from(surprise, gamma * lam)


ADVANTAGES: dict[str, Entry] = {
    "grpo": Entry(function=grpo, formula="(R - mean_g) / (std_g + std_eps)", group=True),
    "no_std": Entry(function=no_std, formula="R - mean_g", group=True),
    "batch_std": Entry(function=batch_std, formula="(R - mean_g) / (std of the step + std_eps)", group=True),
    "rloo": Entry(function=rloo, formula="R - mean of the other members", group=True),
    "opo": Entry(function=opo, formula="R - length-weighted mean_g", group=True),
    "gpg": Entry(
        function=gpg, formula="alpha (R - mean_g), alpha = live members / those in groups that differ", group=True
    ),
    "max_rl": Entry(function=max_rl, formula="(R - mean_g) / mean_g, 0 where mean_g <= 0", group=True, positive=True),
    "grpo_passk": Entry(
        function=grpo_passk, formula="best member: (R_1 - R_2) / (std_g + std_eps); others 0", group=True
    ),
    "cpgd": Entry(
        function=cpgd, formula="(R - mean_g) / (std_g + std_eps), or times groups / groups that differ", group=True
    ),
    "gdpo": Entry(
        function=gdpo,
        formula="sum over terms of v (r - mean_g) / (std_g + std_eps), whitened over the step",
        group=True,
        components=True,
    ),
    "drpo": Entry(
        function=drpo, formula="w_domain (R - mean_g) / (std_g + std_eps) / std of the step", group=True, domains=True
    ),
    "reinforce": Entry(function=returns, formula="discounted return from t on", whiten=False),
    "reinforce_pp": Entry(
        function=returns, formula="discounted return from t on, whitened over the tokens of the step", whiten=True
    ),
    "reinforce_pp_baseline": Entry(
        function=no_std, formula="R - mean_g, whitened over the tokens of the step", group=True, whiten=True
    ),
    "remax": Entry(function=remax, formula="return from t on - R of a greedy rollout", greedy=True),
    "gae": Entry(
        function=gae,
        formula="A_t = r_t + gamma V_t+1 - V_t + gamma lam A_t+1, whitened over the step",
        whiten=True,
        critic=True,
    ),
}


# -- what holds for every estimator ----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Advantages:
    values: Tensor  # [T] float64, 0 where the member is not live
    returns: Tensor | None  # [T] what the critic learns, 0 where not live; None without a critic
    live: Tensor  # [S] bool, without singletons and, if wanted, without constant groups
    constant_low: int  # groups, by whether their common reward is below 1/2
    constant_high: int
    singleton: int
    no_baseline: int  # groups whose greedy rollout failed
    clip_frac: float  # live tokens beyond adv_clip, before it acts


def compute(
    estimator: Entry,
    inputs: AdvantageInputs,
    options: Mapping[str, Any] = MappingProxyType({}),
    *,
    whiten: bool | None = None,
    whiten_std: bool = True,
    adv_clip: float = 0.0,
    drop_constant: bool = False,
) -> Advantages:
    """`whiten` None: as the estimator has it; `adv_clip` 0: off."""
    whiten = estimator.whiten if whiten is None else whiten
    assert not (whiten and estimator.whiten is None), "an estimator that is never whitened"
    inputs, no_baseline = _present(estimator, inputs)
    nobody = inputs.live & ~inputs.live
    singleton = inputs.live & (inputs.live_in_group < 2) if estimator.group else nobody
    live = inputs.live & ~singleton
    constant = live & _constant(estimator, inputs) if estimator.group else nobody
    inputs = replace(inputs, live=live & ~constant if drop_constant else live)

    live_tokens = inputs.per_token(inputs.live)
    raw = bound(estimator.function, options)(inputs).where(live_tokens, 0.0)
    values = whitened(raw, live_tokens, std=whiten_std) if whiten else raw
    # Also after whitening: its shift would push a group that says nothing.
    values = values.where(~inputs.per_token(constant), 0.0)
    clip_frac = 0.0
    if adv_clip > 0:
        beyond = (values.abs() > adv_clip).sum() / live_tokens.sum().clamp(min=1)
        clip_frac, values = float(beyond), values.clamp(-adv_clip, adv_clip)
    assert bool(values.isfinite().all()), "advantages must be finite"
    low, critic = inputs.scores < 0.5, inputs.values
    return Advantages(
        values=values,
        returns=None if critic is None else (raw + critic).where(live_tokens, 0.0),
        live=inputs.live,
        constant_low=_count_groups(inputs.groups[constant & low]),
        constant_high=_count_groups(inputs.groups[constant & ~low]),
        singleton=_count_groups(inputs.groups[singleton]),
        no_baseline=_count_groups(inputs.groups[no_baseline]),
        clip_frac=clip_frac,
    )


def whitened(values: Tensor, live: Tensor, *, std: bool = True) -> Tensor:
    """[T] -> [T]: zero mean and, with `std`, unit variance over live tokens; 0 elsewhere."""
    inside = values[live]
    if not len(inside) or is_constant([float(inside.min()), float(inside.max())]):
        return values.new_zeros(len(values))  # not the rounding of the mean, scaled up
    scale = (inside.var() + 1e-8).sqrt() if std and len(inside) > 1 else 1.0
    return ((values - inside.mean()) / scale).where(live, 0.0)


def _present(estimator: Entry, inputs: AdvantageInputs) -> tuple[AdvantageInputs, Tensor]:
    """Without members that have no tokens or no greedy reward to compare with, and the latter."""
    present, no_baseline = inputs.lengths > 0, inputs.live & ~inputs.live
    if estimator.greedy:
        assert inputs.greedy is not None
        no_baseline = inputs.live & present & ~inputs.greedy.isfinite()
        present = present & inputs.greedy.isfinite()
    live, baseline = inputs.live & present, inputs.baseline & present
    return replace(inputs, live=live, baseline=baseline), no_baseline


def _constant(estimator: Entry, inputs: AdvantageInputs) -> Tensor:
    """[S] bool; where terms are compared one by one, all of them must be constant."""
    if not estimator.components:
        return inputs.constant
    assert inputs.components is not None
    return reduce(and_, map(inputs.same, inputs.components.T))


def _standardised(inputs: AdvantageInputs, std_eps: float) -> Tensor:
    # With std_eps=0 a constant group would be 0/0.
    return (inputs.centred / (inputs.group_std + std_eps)).where(~inputs.constant, 0.0)


def _divisor(values: Tensor, eps: float) -> Tensor | float:
    """Std + eps; 1 for a lone value or equal ones, which eps alone would blow up."""
    return values.std() + eps if len(values) > 1 and not is_constant(values.tolist()) else 1.0


def _count_groups(groups: Tensor) -> int:
    return len(groups.unique())
