"""The members of a step as flat tensors, and statistics over their groups.

Axes: S members (sequences), T policy tokens, K terms of the reward; tokens of a member are
contiguous and in order of time. Knows nothing of what an estimator makes of them.

    >>> inputs.group_mean  # [S], of each member's own group
    tensor([0.5000, 0.5000, 1.2500, 1.2500], dtype=torch.float64)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from saccade.algorithms.filters import CONSTANT_TOLERANCE

if TYPE_CHECKING:
    from torch import Tensor

INFINITY = float("inf")
PER_MEMBER = (
    *("rewards", "groups", "live", "baseline", "lengths"),
    *("final_values", "greedy", "components", "domain_weights", "drift"),
)
PER_TOKEN = ("sequence", "token_penalties", "values")


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
    # What only some estimators read.
    values: Tensor | None = None  # [T] of the critic, at the position that predicts the token
    final_values: Tensor | None = None  # [S] value after the last token; None: 0, episodes end
    greedy: Tensor | None = None  # [S] reward of the group's greedy rollout; NaN: it failed
    components: Tensor | None = None  # [S, K] terms of the reward, shaping included
    component_weights: Tensor | None = None  # [K], or [S, K] where members have their own
    domain_weights: Tensor | None = None  # [S] of the group: `weigh` of the estimator
    drift: Tensor | None = None  # [S] sum over tokens of k3(old, ref)

    def __post_init__(self) -> None:
        for names in (PER_MEMBER, PER_TOKEN):
            columns = [getattr(self, name) for name in names]
            assert len({len(column) for column in columns if column is not None}) == 1, names
        assert bool((self.baseline | ~self.live).all()), "a live member must be in the baseline"
        assert bool(self.scores.isfinite().all()), "a reward that is not finite is status 'error'"

    @cached_property
    def scores(self) -> Tensor:
        """[S] reward minus the KL of all tokens; 0 for members outside the baseline."""
        penalty = self.sum_by(self.sequence, self.token_penalties, len(self.rewards))
        return (self.rewards - penalty).where(self.baseline, 0.0)

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
        """[S] members in the baseline of the group, at least 1 so that it may divide."""
        return self.group_sum(self.scores.new_ones(len(self.scores))).clamp(min=1)

    @cached_property
    def live_in_group(self) -> Tensor:
        """[S] members of the group that train."""
        index = self.group_index
        return self.sum_by(index, self.live.double(), len(index))[index]

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
        """[T] the reward on the last token, minus the KL of each."""
        rewards = self.per_token(self.rewards.where(self.baseline, 0.0))
        return rewards.where(self.ends, 0.0) - self.token_penalties

    def same(self, values: Tensor) -> Tensor:
        """[S] -> [S] bool: equal in the group by range; a rounding residue is no difference."""
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
        return values[self.sequence]

    def sum_from(self, values: Tensor, rate: float) -> Tensor:
        """[T] -> [T]: sum over s >= t of rate^(s-t) values_s, within each member."""
        total, reach = values, 1
        longest = int(self.sequence.bincount().max()) if len(values) else 0
        while reach < longest:  # doubling: after k rounds each token has seen 2^k of its member
            same = self.sequence[reach:] == self.sequence[:-reach]
            later = total.new_zeros(len(total))
            later[:-reach] = total[reach:].where(same, 0.0)
            total = total + rate**reach * later
            reach *= 2
        return total

    @staticmethod
    def sum_by(index: Tensor, values: Tensor, count: int) -> Tensor:
        return values.new_zeros(count).index_add(0, index, values)
