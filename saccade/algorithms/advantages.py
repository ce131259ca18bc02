"""Advantages from rewards, over whole groups of a whole step, in float64 on the CPU.

An estimator is `f(inputs, *, options) -> [T]`. `compute` applies the rules common to all of them: a
group shrunk to one member does not train, a constant group gets exactly 0, whitening happens at most
once, the clip comes last. Knows nothing of losses, masks or how rewards were made.
Axes: S members (sequences), T policy tokens, K terms of the reward; tokens of a member are
contiguous and in order of time.

    >>> compute(ADVANTAGES["grpo"].with_options({"std_eps": 1e-4}), inputs).values
    tensor([ 0.7070,  0.7070, -0.7070], dtype=torch.float64)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from operator import and_
from typing import TYPE_CHECKING

from saccade.algorithms.filters import CONSTANT_TOLERANCE, is_constant
from saccade.algorithms.table import Entry, NotNegative, PositiveShare, Share, add, table_of

if TYPE_CHECKING:
    from torch import Tensor

ADVANTAGES = table_of("advantages")
INFINITY = float("inf")


@dataclass(frozen=True, kw_only=True)
class AdvantageInputs:
    """Inputs of an estimator. The properties `group_*` give each member the value of its group."""

    rewards: Tensor  # [S] shaped; ignored, may be NaN, where a member is not in the baseline
    groups: Tensor  # [S] int64, index of the group of each member
    live: Tensor  # [S] bool: the member trains
    baseline: Tensor  # [S] bool: enters the statistics of its group; every live member does
    lengths: Tensor  # [S] number of policy tokens of a member
    sequence: Tensor  # [T] member of each policy token
    token_penalties: Tensor  # [T] KL in the reward, times its coefficient; 0 without one
    # Read by some estimators only.
    values: Tensor | None = None  # [T] the critic's value at the position that predicts the token
    final_values: Tensor | None = None  # [S] the critic's value after the last token; None: 0
    greedy: Tensor | None = None  # [S] reward of the group's greedy rollout; NaN: it failed
    components: Tensor | None = None  # [S, K] terms of the reward, shaping included
    component_weights: Tensor | None = None  # [K], or [S, K] if they differ between members
    domain_weights: Tensor | None = None  # [S] weight of the group, from the estimator's `weigh`
    drift: Tensor | None = None  # [S] sum over tokens of k3(old, ref)
    turns: Tensor | None = None  # [T] turn of each token, from 0
    earned: Tensor | None = None  # [S, turns] the environment's reward of each turn, a part of `rewards`

    def __post_init__(self) -> None:
        assert bool((self.baseline | ~self.live).all()), "a live member must be in the baseline"
        assert bool(self.scores.isfinite().all()), "a reward that is not finite is status 'error'"

    @cached_property
    def scores(self) -> Tensor:
        """[S] reward minus the KL of all tokens; 0 for members outside the baseline."""
        rewards = self.rewards
        if self.token_penalties.numpy().any():
            rewards = rewards - self.sum_by(self.sequence, self.token_penalties, len(rewards))
        return rewards.where(self.baseline, 0.0)

    @cached_property
    def centred(self) -> Tensor:
        """[S] score minus the mean of the group; exactly 0 where the group is constant."""
        return (self.scores - self.group_mean).where(~self.constant, 0.0)

    @cached_property
    def constant(self) -> Tensor:
        """[S] bool: all members of the group have the same score."""
        return self.same(self.scores)

    @cached_property
    def group_index(self) -> Tensor:
        return self.groups.unique(return_inverse=True)[1]

    @cached_property
    def group_size(self) -> Tensor:
        """[S] number of members in the baseline of the group; at least 1, as it is a divisor."""
        return self.group_sum(self.scores.new_ones(len(self.scores))).clamp(min=1)

    @cached_property
    def group_mean(self) -> Tensor:
        return self.group_sum(self.scores) / self.group_size

    @cached_property
    def group_std(self) -> Tensor:
        """[S] unbiased; 0 in a group of one."""
        squares = self.group_sum((self.scores - self.group_mean).square())
        return (squares / (self.group_size - 1).clamp(min=1)).sqrt()

    @cached_property
    def ends(self) -> Tensor:
        """[T] bool: last token of its member."""
        return self.sequence.diff(append=self.sequence.new_full((1,), -1)) != 0

    @cached_property
    def token_rewards(self) -> Tensor:
        """[T] the member's reward on its last token, minus the KL of each token."""
        rewards = self.per_token(self.rewards.where(self.baseline, 0.0))
        return rewards.where(self.ends, 0.0) - self.token_penalties

    def same(self, values: Tensor) -> Tensor:
        """[S] -> [S] bool: all values of the group are equal up to rounding, by their range."""
        high, low = self.group_max(values), -self.group_max(-values)
        return high - low <= CONSTANT_TOLERANCE * high.abs().maximum(low.abs()).clamp(min=1)

    def group_sum(self, values: Tensor) -> Tensor:
        """[S] -> [S], over the baseline members of each group."""
        index = self.group_index
        return self.sum_by(index, values.where(self.baseline, 0.0), len(values))[index]

    def group_max(self, values: Tensor) -> Tensor:
        """[S] -> [S], over the baseline members of each group."""
        index = self.group_index
        inside = values.where(self.baseline, -INFINITY)
        empty = inside.new_full((len(values),), -INFINITY)
        return empty.scatter_reduce(0, index, inside, "amax")[index]

    def per_token(self, values: Tensor) -> Tensor:
        """[S] -> [T]"""
        return values.index_select(0, self.sequence)

    def zero_others(self, values: Tensor, members: Tensor) -> Tensor:
        """[T] -> [T]: 0 at the tokens of other members."""
        return values if members.all() else values.where(self.per_token(members), 0.0)

    def sum_from(self, values: Tensor, rate: float) -> Tensor:
        """[T] -> [T]: sum over s >= t of rate^(s-t) values_s, within each member."""
        total, reach = values, 1
        longest = int(self.sequence.bincount().max()) if len(values) else 0
        while reach < longest:  # doubling: after k rounds each token has the sum over 2^k tokens of its member
            same = self.sequence[reach:] == self.sequence[:-reach]
            later = total.new_zeros(len(total))
            later[:-reach] = total[reach:].where(same, 0.0)
            total = total + rate**reach * later
            reach *= 2
        return total

    @staticmethod
    def sum_by(index: Tensor, values: Tensor, count: int) -> Tensor:
        return values.new_zeros(count).index_add(0, index, values)


def whitened(values: Tensor, live: Tensor, *, whiten: bool = True, whiten_std: bool = True) -> Tensor:
    """[T] -> [T]: zero mean and, with `whiten_std`, unit variance over live tokens; 0 elsewhere."""
    if not whiten:
        return values
    inside = values[live]
    if not len(inside) or is_constant([float(inside.min()), float(inside.max())]):
        return values.new_zeros(len(values))  # dividing would only scale up the rounding error of the mean
    scale = (inside.var() + 1e-8).sqrt() if whiten_std and len(inside) > 1 else 1.0
    return ((values - inside.mean()) / scale).where(live, 0.0)


# -- one number per member -------------------------------------------------------------------------


@add(ADVANTAGES, "(R - mean_g) / (std_g + std_eps)", group=True, by_member=True)
def grpo(inputs: AdvantageInputs, *, std_eps: NotNegative = 1e-6) -> Tensor:
    """arXiv 2402.03300"""
    return inputs.per_token(standardised(inputs, std_eps))


@add(ADVANTAGES, "R - mean_g, whitened over the tokens", name="reinforce_pp_baseline", group=True, whiten=whitened)
@add(ADVANTAGES, "R - mean_g", group=True, by_member=True)
def no_std(inputs: AdvantageInputs) -> Tensor:
    """Dr. GRPO, arXiv 2503.20783: without the division, prompts weigh in proportion to their std."""
    return inputs.per_token(inputs.centred)


@add(ADVANTAGES, "R - mean of the other members", group=True, by_member=True)
def rloo(inputs: AdvantageInputs) -> Tensor:
    """arXiv 2402.14740"""
    others = (inputs.group_size - 1).clamp(min=1)
    baseline = (inputs.group_sum(inputs.scores) - inputs.scores) / others
    return inputs.per_token(inputs.scores - baseline)


# -- one number per token --------------------------------------------------------------------------


@add(ADVANTAGES, "discounted return from t on, whitened over the step", name="reinforce_pp", whiten=whitened)
@add(ADVANTAGES, "discounted return from t on", name="reinforce", whiten=whitened, overrides={"whiten": False})
def returns(inputs: AdvantageInputs, *, gamma: PositiveShare = 1.0) -> Tensor:
    return inputs.sum_from(inputs.token_rewards, gamma)


@add(ADVANTAGES, "return from t on - R of a greedy rollout", greedy=True)
def remax(inputs: AdvantageInputs) -> Tensor:
    """arXiv 2310.10505"""
    assert inputs.greedy is not None
    return returns(inputs) - inputs.per_token(inputs.greedy)


@add(ADVANTAGES, "A_t = r_t + gamma V_t+1 - V_t + gamma lam A_t+1, whitened", critic=True, whiten=whitened)
def gae(inputs: AdvantageInputs, *, gamma: PositiveShare = 1.0, lam: Share = 0.95) -> Tensor:
    """arXiv 1506.02438"""
    assert inputs.values is not None
    final = inputs.final_values
    end = inputs.values.new_zeros(()) if final is None else inputs.per_token(final)
    following = inputs.values.roll(-1).where(~inputs.ends, end)
    surprise = inputs.token_rewards + gamma * following - inputs.values
    return inputs.sum_from(surprise, gamma * lam)


# -- rules for every estimator ---------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Advantages:
    values: Tensor  # [T] float64, 0 where the member is not live
    returns: Tensor | None  # [T] the critic's targets, 0 where not live; None without a critic
    live: Tensor  # [S] bool, without singletons and, if wanted, without constant groups
    clip_frac: float  # share of live tokens beyond adv_clip before clipping
    # Numbers of groups: constant_low and constant_high (their common reward is below 1/2, or not),
    # singleton (one member), no_baseline (no greedy reward).
    counts: Mapping[str, int]


def compute(
    estimator: Entry, inputs: AdvantageInputs, *, adv_clip: float = 0.0, drop_constant: bool = False
) -> Advantages:
    """Run an estimator and apply the rules common to all estimators. `adv_clip` 0: off."""
    nobody, present = inputs.live.new_zeros(len(inputs.live)), inputs.lengths > 0
    has_baseline = present if inputs.greedy is None or not estimator.greedy else inputs.greedy.isfinite()
    no_baseline, present = inputs.live & present & ~has_baseline, present & has_baseline
    inputs = replace(inputs, live=inputs.live & present, baseline=inputs.baseline & present)
    singleton = inputs.live & (inputs.group_sum(inputs.live.double()) < 2) if estimator.group else nobody
    live = inputs.live & ~singleton
    # If terms are compared one by one, a group is constant only if all of them are.
    terms = [inputs.scores] if inputs.components is None or not estimator.components else inputs.components.T
    constant = live & reduce(and_, map(inputs.same, terms)) if estimator.group else nobody
    inputs = replace(inputs, live=live & ~constant if drop_constant else live)

    raw = inputs.zero_others(estimator(inputs), inputs.live)
    values = estimator.bound("whiten")(raw, inputs.per_token(inputs.live)) if estimator.whiten else raw
    # Also after whitening, whose shift would give constant groups a nonzero advantage.
    values = inputs.zero_others(values, ~constant)
    clip_frac = 0.0
    if adv_clip > 0:
        beyond = (values.abs() > adv_clip).sum() / inputs.per_token(inputs.live).sum().clamp(min=1)
        clip_frac, values = float(beyond), values.clamp(-adv_clip, adv_clip)
    assert bool(values.sum().isfinite()), "advantages must be finite"
    low, critic = inputs.scores < 0.5, inputs.values
    noted = {"constant_low": constant & low, "constant_high": constant & ~low}
    noted |= {"singleton": singleton, "no_baseline": no_baseline}
    return Advantages(
        values=values,
        returns=None if critic is None else inputs.zero_others(raw + critic, inputs.live),
        live=inputs.live,
        clip_frac=clip_frac,
        counts={name: count_groups(inputs.groups[mask]) for name, mask in noted.items()},
    )


def standardised(inputs: AdvantageInputs, std_eps: float) -> Tensor:
    # With std_eps=0 a constant group would be 0/0.
    return (inputs.centred / (inputs.group_std + std_eps)).where(~inputs.constant, 0.0)


def count_groups(groups: Tensor) -> int:
    return len(groups.unique())
