"""Less common advantage estimators. Axes: S members (sequences), T policy tokens.

`drpo` keeps statistics of each domain: how many groups it had, and how successful they were. A domain has ten bins of
success y in [0, 1]; counts decay with a half-life, so that old groups lose weight. The state is plain lists, saved in
checkpoints as JSON.

    >>> domains = noted({}, [("xray", 0.25), ("ct", 0.625)])
    >>> weight(domains, "xray", 0.25), weight(domains, "ct", 0.625)
    (16.0, 2.56)

>>> compute(ADVANTAGES["max_rl"], inputs).values
tensor([ 1.0000,  1.0000, -1.0000], dtype=torch.float64)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import sqrt
from typing import TYPE_CHECKING, Literal

from saccade.algorithms.advantages import INFINITY, AdvantageInputs, count_groups, grpo, no_std, standardised, whitened
from saccade.algorithms.algorithm_state import outcomes_of
from saccade.algorithms.filters import is_constant
from saccade.algorithms.resolved_algorithm import Algorithm
from saccade.algorithms.table import Entry, NotNegative, Positive, PositiveShare, ShareBelowOne, add
from saccade.errors import ConfigError
from saccade.types import Group

if TYPE_CHECKING:
    from torch import Tensor

ROWS: dict[str, Entry] = {}


# -- turns ----------------------------------------------------------------------------------------


@add(
    ROWS, "(G_k - mean) / (std + std_eps) of turn k over the group; G_k: return from turn k on", group=True, turns=True
)
def turn_grpo(inputs: AdvantageInputs, *, gamma: PositiveShare = 1.0, std_eps: NotNegative = 1e-6) -> Tensor:
    """Credit per turn (arXiv 2505.11821). The return of a turn sums the environment's rewards from it on and the rest
    of the reward, which belongs to the last turn. It is compared with the same turn of other members.
    """
    import torch

    turns = torch.zeros_like(inputs.sequence) if inputs.turns is None else inputs.turns
    earned = inputs.scores.new_zeros(len(inputs.scores), 1) if inputs.earned is None else inputs.earned
    count = earned.shape[1]
    place = inputs.sequence * count + turns  # [T] index of a token's turn in the flattened [S, turns]
    there = inputs.sum_by(place, torch.ones_like(place, dtype=earned.dtype), earned.numel()).view_as(earned) > 0
    last = inputs.sequence.new_zeros(len(earned)).scatter_reduce(0, inputs.sequence, turns, "amax")
    rest = inputs.rewards.where(inputs.baseline, 0.0) - earned.sum(1).where(inputs.baseline, 0.0)
    gains = earned.where(inputs.baseline[:, None], 0.0).scatter_add(1, last[:, None], rest[:, None])
    gains = gains - inputs.sum_by(place, inputs.token_penalties, earned.numel()).view_as(earned)
    for turn in range(count - 2, -1, -1):
        gains[:, turn] += gamma * gains[:, turn + 1]
    counts = there & inputs.baseline[:, None]
    group = inputs.group_index[:, None] * count + torch.arange(count)

    def over(values: Tensor) -> Tensor:
        """[S, turns] -> [S, turns]: sums over the members of the group that have this turn."""
        summed = inputs.sum_by(group.flatten(), values.where(counts, 0.0).flatten(), earned.numel())
        return summed[group.flatten()].view_as(values)

    several = over(torch.ones_like(gains))
    apart = gains - over(gains) / several.clamp(min=1)
    spread = (over(apart.square()) / (several - 1).clamp(min=1)).sqrt()
    known = counts & (several > 1) & (spread > 1e-9)
    return (apart / (spread + std_eps)).where(known, 0.0).flatten()[place]


# -- domains --------------------------------------------------------------------------------------

BINS = 10
HALF_LIFE = 5000  # in groups of the domain
LEAST_SUCCESS = 0.05  # lower bound, so that the weight of a domain that always fails is finite
FADED = 1e-12  # decayed counts below this are set to 0, as their inverse could overflow

Range = tuple[float, float]  # lowest and highest possible outcome
UNIT = (0.0, 1.0)
Domains = Mapping[str, Mapping[str, Sequence[float]]]  # domain → decayed counts and sums of success, per bin


def observe(domains: Domains, groups: Sequence[Group], algorithm: Algorithm, *, reward_range: Range = UNIT) -> Domains:
    """Update the statistics with all scored groups of a step, in the order of their uids."""
    seen = [(domain_of(g), success_of(g, algorithm, reward_range)) for g in sorted(groups, key=lambda group: group.uid)]
    return noted(domains, [(domain, y) for domain, y in seen if y is not None])


def weigh(domains: Domains, group: Group, algorithm: Algorithm, *, reward_range: Range = UNIT) -> float:
    """The weight of a group that was observed; 1 if no member has an outcome."""
    y = success_of(group, algorithm, reward_range)
    return 1.0 if y is None else weight(domains, domain_of(group), y)


def domain_of(group: Group) -> str:
    domain = group.sample.extra.get("domain")
    return "default" if domain in (None, "") else str(domain)


def success_of(group: Group, algorithm: Algorithm, reward_range: Range) -> float | None:
    """Mean raw outcome, scaled from `reward_range` to [0, 1]; None if no member has an outcome."""
    outcomes = outcomes_of(group, algorithm)
    return success(outcomes, reward_range) if outcomes else None


def success(outcomes: Sequence[float], reward_range: Range) -> float:
    """Mean raw outcome of a group, scaled from `reward_range` to [0, 1]; refuses outcomes outside the range."""
    low, high = reward_range
    rounding = 1e-6 * (high - low)
    for outcome in outcomes:
        if not low - rounding <= outcome <= high + rounding:
            wider = f"algorithm.args.reward_range=[{min(low, outcome)}, {max(high, outcome)}]"
            raise ConfigError(f"an outcome of {outcome} is outside reward_range=[{low}, {high}]; try {wider}")
    mean = sum(outcomes) / len(outcomes)
    return min(1.0, max(0.0, (mean - low) / (high - low)))


def noted(domains: Domains, seen: Sequence[tuple[str, float]]) -> Domains:
    """The statistics updated with `seen`, (domain, success) of each group."""
    updated = dict(domains)
    for domain, groups in Counter(domain for domain, _ in seen).items():
        bins = updated.get(domain, {"counts": [0.0] * BINS, "sums": [0.0] * BINS})
        keep = 2.0 ** (-groups / HALF_LIFE)
        counts = [keep * n if keep * n > FADED else 0.0 for n in bins["counts"]]
        sums = [keep * y if n else 0.0 for y, n in zip(bins["sums"], counts, strict=True)]
        for y in (y for name, y in seen if name == domain):
            counts[_bin(y)] += 1
            sums[_bin(y)] += y
        updated[domain] = {"counts": counts, "sums": sums}
    return updated


def weight(domains: Domains, domain: str, y: float) -> float:
    """The weight of a noted group with success `y`: larger if the domain is rare and hard."""
    counts, sums = domains[domain]["counts"], domains[domain]["sums"]
    used = [(n, total / n) for n, total in zip(counts, sums, strict=True) if n > 0]
    count, mean = counts[_bin(y)], sums[_bin(y)]
    assert count > 0, f"no group of {domain} with success {y} was observed"
    domain_mean = sum(m / n for n, m in used) / sum(1 / n for n, _ in used)
    in_domain = sqrt(sum(counts)) * max(domain_mean, LEAST_SUCCESS)
    in_bin = sqrt(count) * max(mean / count, LEAST_SUCCESS)
    return 1 / (max(in_domain, LEAST_SUCCESS) * in_bin)


def _bin(y: float) -> int:
    assert 0 <= y <= 1, y
    return min(int(y * BINS), BINS - 1)


# -- estimators ------------------------------------------------------------------------------------


@add(ROWS, "(R - mean_g) / (std of the step + std_eps)", group=True)
def batch_std(inputs: AdvantageInputs, *, std_eps: NotNegative = 1e-6) -> Tensor:
    return inputs.per_token(inputs.centred / _divisor(inputs.scores[inputs.live], std_eps))


@add(ROWS, "R - length-weighted mean_g", group=True)
def opo(inputs: AdvantageInputs) -> Tensor:
    """Length-weighted mean of the group as baseline, which minimises the variance (arXiv 2505.23585)."""
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
    std_eps: NotNegative = 1e-6,
) -> Tensor:
    """Scaled up to compensate for members without signal (arXiv 2504.02546)."""
    carries = {"nonconstant": ~inputs.constant, "nonzero_rewards": inputs.rewards != 0}[gpg_alpha]
    alpha = inputs.live.sum().double() / (carries & inputs.live).sum().clamp(min=1)
    signal = standardised(inputs, std_eps) if gpg_divisor == "std" else inputs.centred
    return inputs.per_token(signal * alpha.clamp(max=gpg_alpha_max))


@add(ROWS, "(R - mean_g) / mean_g, 0 where mean_g <= 0", group=True, positive=True)
def max_rl(inputs: AdvantageInputs) -> Tensor:
    """arXiv 2602.02710"""
    if bool((inputs.scores < 0).any()):
        needs = "divides by the mean reward and needs rewards >= 0, a KL in the reward included"
        raise ConfigError(f"algorithm.advantage=max_rl {needs}; use algorithm.advantage=grpo, or positive rewards")
    mean = inputs.group_mean
    return inputs.per_token((inputs.centred / mean).where(mean > 0, 0.0))


@add(ROWS, "best member: (R_1 - R_2) / (std_g + std_eps); others 0", group=True)
def grpo_passk(inputs: AdvantageInputs, *, std_eps: NotNegative = 1e-6, divide_by_std: bool = True) -> Tensor:
    """Only the best member of a group gets an advantage, its lead over the second best (arXiv 2503.19595)."""
    scores, order = inputs.scores, inputs.scores.new_ones(len(inputs.scores)).cumsum(0)
    leads = scores == inputs.group_max(scores)
    first = order == -inputs.group_max((-order).where(leads, -INFINITY))
    second = inputs.group_max(scores.where(~first, -INFINITY))
    divisor = inputs.group_std + std_eps if divide_by_std else 1.0
    return inputs.per_token(((scores - second) / divisor).where(first, 0.0))


@add(ROWS, "(R - mean_g) / (std_g + std_eps), or times groups / groups that differ", group=True)
def cpgd(
    inputs: AdvantageInputs, *, cpgd_weight: Literal["std", "clip_filter", "none"] = "std", std_eps: NotNegative = 1e-6
) -> Tensor:
    """arXiv 2505.12504; `clip_filter` scales up to compensate for groups without signal, at most threefold."""
    if cpgd_weight == "std":
        return grpo(inputs, std_eps=std_eps)
    if cpgd_weight == "none":
        return no_std(inputs)
    groups = count_groups(inputs.groups[inputs.live])
    differing = count_groups(inputs.groups[inputs.live & ~inputs.constant])
    return inputs.per_token(inputs.centred * min(groups / max(differing, 1), 3.0))


@add(ROWS, "sum over terms of v (r - mean_g) / (std_g + std_eps), whitened over the step", group=True, components=True)
def gdpo(
    inputs: AdvantageInputs, *, std_eps: NotNegative = 1e-6, gdpo_whiten: Literal["seq", "token"] = "seq"
) -> Tensor:
    """Each term of the reward is standardised separately (arXiv 2601.05242); a KL belongs in the loss."""
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
    std_eps: NotNegative = 1e-6,
    drpo_renorm: Literal["std", "rms"] = "std",
    drpo_kl_damp: ShareBelowOne = 0.0,
) -> Tensor:
    """Rare and hard domains weigh more (after arXiv 2506.00711).

    `drpo_kl_damp` damps members by |A| times their drift from the reference; it is a quantile of that
    product, such as 0.75: a member at the quantile gets half its advantage.
    """
    assert inputs.domain_weights is not None
    carries = inputs.live & ~inputs.constant
    counted = carries.to(inputs.scores)
    once = counted / inputs.group_sum(counted).clamp(min=1)  # each group counts once, whatever its size
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
        if limit > 0:  # at 0 the formula would set the members with a drift to 0
            weighted = weighted * limit / (strain + limit)
    return inputs.per_token(weighted)


def _divisor(values: Tensor, eps: float) -> Tensor | float:
    """Std + eps; 1 for one value or equal values, where dividing by eps alone would blow up rounding errors."""
    return values.std() + eps if len(values) > 1 and not is_constant(values.tolist()) else 1.0
