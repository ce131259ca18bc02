"""Rewards become advantages, over whole groups of a whole step, in float64 on the CPU.

An estimator is `f(inputs) -> [T]`. What holds for all of them is done once, in `compute`: a group
shrunk to one member does not train, a constant group gets exactly 0, whitening happens at most
once, the clip comes last. Knows nothing of losses, masks or how rewards were made. Axes: S members
(sequences), T policy tokens; tokens of a member are contiguous and in order of time.

    >>> compute(ADVANTAGES["grpo"], inputs).values
    tensor([ 0.7071,  0.7071, -0.7071], dtype=torch.float64)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from saccade.algorithms.filters import CONSTANT_TOLERANCE
from saccade.algorithms.table import Entry

if TYPE_CHECKING:
    from torch import Tensor

INFINITY = float("inf")


@dataclass(frozen=True, kw_only=True)
class AdvantageOptions:
    std_eps: float = 1e-6
    gamma: float = 1.0
    divide_by_std: bool = True  # grpo_passk
    alpha: Literal["nonconstant", "nonzero_rewards"] = "nonconstant"  # gpg
    alpha_max: float = INFINITY  # gpg


@dataclass(frozen=True, kw_only=True)
class AdvantageInputs:
    """What an estimator sees. A property `group_*` has one value per member, of its own group."""

    rewards: Tensor  # [S] shaped; anything, also NaN, where a member is not in the baseline
    groups: Tensor  # [S] int64
    live: Tensor  # [S] bool: trains
    baseline: Tensor  # [S] bool: enters the statistics of its group; every live member does
    lengths: Tensor  # [S] policy tokens of a member
    sequence: Tensor  # [T] member of each policy token
    token_penalties: Tensor  # [T] KL in the reward, times its coefficient; zeros without
    options: AdvantageOptions = AdvantageOptions()

    def __post_init__(self) -> None:
        assert len(self.rewards) == len(self.groups) == len(self.live) == len(self.baseline)
        assert len(self.sequence) == len(self.token_penalties)
        assert bool((self.baseline | ~self.live).all()), "a live member must be in the baseline"
        assert bool(self.scores.isfinite().all()), "a reward that is not finite is status 'error'"

    @cached_property
    def scores(self) -> Tensor:
        """[S] reward minus the KL of all tokens; 0 for members outside the baseline."""
        penalty = self.sum_by(self.sequence, self.token_penalties, len(self.rewards))
        return (self.rewards - penalty).where(self.baseline, 0.0)

    @cached_property
    def group_index(self) -> Tensor:
        return self.groups.unique(return_inverse=True)[1]

    @cached_property
    def group_size(self) -> Tensor:
        """[S] members in the baseline of the group, at least 1 so that it may divide."""
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
    def constant(self) -> Tensor:
        """[S] bool: all members of the group have the same score, by range."""
        high, low = self.group_max(self.scores), -self.group_max(-self.scores)
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
        return values[self.sequence]

    @staticmethod
    def sum_by(index: Tensor, values: Tensor, count: int) -> Tensor:
        return values.new_zeros(count).index_add(0, index, values)


# -- estimators ------------------------------------------------------------------------------------


def grpo(inputs: AdvantageInputs) -> Tensor:
    """arXiv 2402.03300"""
    centred = inputs.scores - inputs.group_mean
    return inputs.per_token(centred / (inputs.group_std + inputs.options.std_eps))


def no_std(inputs: AdvantageInputs) -> Tensor:
    """Dr. GRPO, arXiv 2503.20783: without a divisor easy and hard prompts weigh as their spread."""
    return inputs.per_token(inputs.scores - inputs.group_mean)


def batch_std(inputs: AdvantageInputs) -> Tensor:
    spread = _std(inputs.scores[inputs.live])
    centred = inputs.scores - inputs.group_mean
    return inputs.per_token(centred / (spread + inputs.options.std_eps))


def rloo(inputs: AdvantageInputs) -> Tensor:
    """arXiv 2402.14740"""
    others = (inputs.group_sum(inputs.scores) - inputs.scores) / (inputs.group_size - 1).clamp(
        min=1
    )
    return inputs.per_token(inputs.scores - others)


def opo(inputs: AdvantageInputs) -> Tensor:
    """The baseline of least variance weighs members by length (arXiv 2505.23585)."""
    lengths = inputs.lengths.to(inputs.scores)
    baseline = inputs.group_sum(lengths * inputs.scores) / inputs.group_sum(lengths).clamp(min=1)
    return inputs.per_token(inputs.scores - baseline)


def gpg(inputs: AdvantageInputs) -> Tensor:
    """Scaled up for members that carry no signal (arXiv 2504.02546)."""
    carries = {
        "nonconstant": ~inputs.constant,
        "nonzero_rewards": inputs.rewards != 0,
    }[inputs.options.alpha]
    alpha = inputs.live.sum().double() / (carries & inputs.live).sum().clamp(min=1)
    centred = inputs.scores - inputs.group_mean
    return inputs.per_token(centred * alpha.clamp(max=inputs.options.alpha_max))


def max_rl(inputs: AdvantageInputs) -> Tensor:
    """arXiv 2602.02710"""
    if bool((inputs.scores < 0).any()):
        raise ValueError(
            "algorithm.advantage=max_rl divides by the mean reward and needs rewards >= 0; "
            "use algorithm.advantage=grpo, or rewards without negative parts"
        )
    mean = inputs.group_mean
    return inputs.per_token(((inputs.scores - mean) / mean).where(mean > 0, 0.0))


def grpo_passk(inputs: AdvantageInputs) -> Tensor:
    """Only the best member of a group, by its lead over the second (arXiv 2503.19595)."""
    scores, order = inputs.scores, inputs.scores.new_ones(len(inputs.scores)).cumsum(0)
    leads = scores == inputs.group_max(scores)
    first = order == -inputs.group_max((-order).where(leads, -INFINITY))
    second = inputs.group_max(scores.where(~first, -INFINITY))
    divisor = inputs.group_std + inputs.options.std_eps if inputs.options.divide_by_std else 1.0
    return inputs.per_token(((scores - second) / divisor).where(first, 0.0))


def returns(inputs: AdvantageInputs) -> Tensor:
    """A_t = sum over s >= t of gamma^(s-t) r_s; the reward is that of the last token."""
    last = inputs.sequence.diff(append=inputs.sequence.new_full((1,), -1)) != 0
    rewards = inputs.per_token(inputs.rewards.where(inputs.baseline, 0.0))
    total = rewards.where(last, 0.0) - inputs.token_penalties
    reach, longest = 1, int(inputs.sequence.bincount().max()) if len(total) else 0
    while reach < longest:  # doubling: after k rounds each token has seen 2^k of its own sequence
        same = inputs.sequence[reach:] == inputs.sequence[:-reach]
        later = total.new_zeros(len(total))
        later[:-reach] = total[reach:].where(same, 0.0)
        total = total + inputs.options.gamma**reach * later
        reach *= 2
    return total


STD_EPS = {"std_eps": 1e-6}
GAMMA = {"gamma": 1.0}
ADVANTAGES: dict[str, Entry] = {
    "grpo": Entry(
        function=grpo, formula="(R - mean_g) / (std_g + std_eps)", options=STD_EPS, group=True
    ),
    "no_std": Entry(function=no_std, formula="R - mean_g", group=True),
    "batch_std": Entry(
        function=batch_std,
        formula="(R - mean_g) / (std of the step + std_eps)",
        options=STD_EPS,
        group=True,
    ),
    "rloo": Entry(function=rloo, formula="R - mean of the other members", group=True),
    "opo": Entry(function=opo, formula="R - length-weighted mean_g", group=True),
    "gpg": Entry(
        function=gpg,
        formula="alpha (R - mean_g), alpha = live members / those in groups that differ",
        options={"alpha": "nonconstant", "alpha_max": INFINITY},
        group=True,
    ),
    "max_rl": Entry(
        function=max_rl, formula="(R - mean_g) / mean_g, 0 where mean_g <= 0", group=True
    ),
    "grpo_passk": Entry(
        function=grpo_passk,
        formula="best member: (R_1 - R_2) / (std_g + std_eps); others 0",
        options={**STD_EPS, "divide_by_std": True},
        group=True,
    ),
    "reinforce": Entry(function=returns, formula="discounted return from t on", options=GAMMA),
    "reinforce_pp": Entry(
        function=returns,
        formula="discounted return from t on, whitened over the tokens of the step",
        options=GAMMA,
        whiten=True,
    ),
    "reinforce_pp_baseline": Entry(
        function=no_std,
        formula="R - mean_g, whitened over the tokens of the step",
        group=True,
        whiten=True,
    ),
}


# -- what holds for every estimator ----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Advantages:
    values: Tensor  # [T] float64, 0 where the member is not live
    live: Tensor  # [S] bool, without singletons and, if wanted, without constant groups
    constant_low: int  # groups, by whether their common reward is below 1/2
    constant_high: int
    singleton: int
    clip_frac: float  # live tokens beyond adv_clip, before it acts


def compute(
    estimator: Entry,
    inputs: AdvantageInputs,
    *,
    adv_clip: float | None = None,
    drop_constant: bool = False,
) -> Advantages:
    has_tokens = inputs.lengths > 0
    inputs = replace(inputs, live=inputs.live & has_tokens, baseline=inputs.baseline & has_tokens)
    nobody = inputs.live & ~inputs.live
    singleton = inputs.live & (inputs.group_size < 2) if estimator.group else nobody
    constant = inputs.live & inputs.constant & ~singleton if estimator.group else nobody
    live = inputs.live & ~singleton & ~constant if drop_constant else inputs.live & ~singleton
    inputs = replace(inputs, live=live)

    live_tokens = inputs.per_token(live)
    values = estimator.function(inputs).where(live_tokens, 0.0)
    if estimator.whiten:
        values = whiten(values, live_tokens)
    # Also after whitening: its shift would push a group that says nothing.
    values = values.where(~inputs.per_token(constant), 0.0)
    clip_frac = 0.0
    if adv_clip is not None:
        beyond = (values.abs() > adv_clip).sum() / live_tokens.sum().clamp(min=1)
        clip_frac, values = float(beyond), values.clamp(-adv_clip, adv_clip)
    assert bool(values.isfinite().all()), "advantages must be finite"
    low = inputs.scores < 0.5
    return Advantages(
        values=values,
        live=live,
        constant_low=_count_groups(inputs.groups[constant & low]),
        constant_high=_count_groups(inputs.groups[constant & ~low]),
        singleton=_count_groups(inputs.groups[singleton]),
        clip_frac=clip_frac,
    )


def whiten(values: Tensor, live: Tensor) -> Tensor:
    """[T] -> [T]: zero mean and unit variance over live tokens, 0 elsewhere."""
    inside = values[live]
    if not len(inside):
        return values
    scale = (_std(inside).square() + 1e-8).sqrt()
    return ((values - inside.mean()) / scale).where(live, 0.0)


def _std(values: Tensor) -> Tensor:
    """Unbiased; 0 for fewer than two values."""
    return values.std() if len(values) > 1 else values.new_zeros(())


def _count_groups(groups: Tensor) -> int:
    return len(groups.unique())
