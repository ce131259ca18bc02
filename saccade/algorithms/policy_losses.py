"""Per-token losses and distances, to be minimised. `objective` applies weights, masks and denominators.

A policy loss is `f(new, inputs, *, options) -> (loss [T], indicators {name: [T] bool})`; only `new`
has a gradient. A distance to the reference is `f(new, ref, *, options) -> [T]`. Sequence-level losses
sum through `inputs.sequence_sum`, so the order of tokens does not matter. In the formulas
r = exp(new - old), u = new - ref and sg is a stop-gradient. Axes: T tokens, S sequences.

    >>> loss, indicators = clip(new, inputs, clip_high=0.28)
    >>> KINDS["k3"].function(new, ref)   # [T], gradient flows to `new`
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal, TypeAlias

from saccade.algorithms.table import NotNegative, Positive, Share, Width, add, table_of

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_LOG_RATIO = 20.0
LARGEST_SEQUENCE_LOG_RATIO = 10.0
SMALLEST_WEIGHT = math.exp(-LARGEST_LOG_RATIO)  # in place of 0 before a logarithm
LARGEST_KL = 10.0  # bound of k3, and of the slopes of k2 and k3
LOSSES = table_of("policy_losses")
KINDS = table_of("kl_kinds")


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """Per-token inputs of a policy loss. The loss function gets 0 where a token is not live."""

    old: Tensor  # [T] the trainer's log-probs before the first update
    advantages: Tensor  # [T]
    scales: Tensor  # [T] weight of a token in the loss; 0: not live
    sequence: Tensor  # [T] index of the sequence of each token
    sequences: int
    weights: Tensor | None = None  # [T] correction weights; None: all 1
    rewards: Tensor | None = None  # [T] shaped reward of the token's member
    selected: Tensor | None = None  # [T] bool: tokens chosen by the loss's `select`
    # Most losses ignore these.
    rollout: Tensor | None = None  # [T] NaN where the engine gave no log-prob
    ref: Tensor | None = None  # [T]
    keep: Tensor | None = None  # [T] factor on the loss; 0 where a filter drops the token
    ages: Tensor | None = None  # [T] steps since the token was sampled; if above 0, a log-prob gap is expected
    images: Tensor | None = None  # [T] bool: the sequence has an image; None: no metrics by modality

    @cached_property
    def live(self) -> Tensor:
        """[T] bool"""
        return self.scales > 0

    def only_live(self) -> LossInputs:
        """A copy with 0 where a token is not live."""
        columns = {n: getattr(self, n) for n in ("old", "advantages", "weights", "rewards", "ref", "keep")}
        return replace(self, **{n: values.where(self.live, 0.0) for n, values in columns.items() if values is not None})

    def sequence_sum(self, values: Tensor) -> Tensor:
        """[T] -> [S]"""
        return values.new_zeros(self.sequences).index_add(0, self.sequence, values)

    def sequence_total(self, values: Tensor) -> Tensor:
        """[T] -> [T]: the sum over the live tokens of a sequence, at each of its tokens."""
        return self.sequence_sum(values.where(self.live, 0.0))[self.sequence]

    def sequence_mean(self, values: Tensor) -> Tensor:
        lengths = self.sequence_total(values.detach().new_ones(len(values)))
        return self.sequence_total(values) / lengths.clamp(min=1)


@dataclass(frozen=True, kw_only=True)
class SelectionInputs:
    """Inputs of a loss's `select`: the live tokens of an optimizer step; detached, float64 except the noise."""

    new: Tensor  # [T] log-probs of a scoring pass before the optimizer step
    old: Tensor  # [T]
    advantages: Tensor  # [T]
    noise: Tensor  # [T] int64


Losses: TypeAlias = "tuple[Tensor, dict[str, Tensor]]"


@add(LOSSES, "max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), r = exp(new - old)")
def clip(
    new: Tensor,
    inputs: LossInputs,
    *,
    clip_low: Share = 0.2,
    clip_high: Width = 0.2,
    dual_clip: NotNegative = 0.0,
    delta: NotNegative = 0.0,
) -> Losses:
    """PPO (arXiv 1707.06347), with dual clip (1912.09729) or delta (2505.07291)."""
    ratio = log_ratio(new, inputs.old).exp()
    return clipped(ratio, inputs.advantages, clip_low, clip_high, dual_clip, delta)


@add(LOSSES, "-A new", ratio=False)
def pg(new: Tensor, inputs: LossInputs) -> Losses:
    return -inputs.advantages * new, {}


@add(LOSSES, "clip loss with the r of gspo, summed by sequence", name="luspo", own_aggregation="seq_sum")
@add(LOSSES, "clip loss with r = exp(mean over the sequence of new - old)", own_aggregation="seq_mean")
def gspo(new: Tensor, inputs: LossInputs, *, clip_low: Share = 3e-4, clip_high: Width = 4e-4) -> Losses:
    """One ratio per sequence (arXiv 2507.18071)."""
    return clipped(sequence_ratio(new, inputs), inputs.advantages, clip_low, clip_high)


@add(LOSSES, "-A new sg[clip(r, weight_floor, weight_cap)]")
def cispo(new: Tensor, inputs: LossInputs, *, weight_floor: NotNegative = 0.0, weight_cap: Positive = 5.0) -> Losses:
    """The ratio is clipped as a weight, so no token loses its gradient (arXiv 2506.13585)."""
    ratio = log_ratio(new, inputs.old).exp().detach()
    loss = -inputs.advantages * new * ratio.clamp(weight_floor, weight_cap)
    return loss, {"clip_low": ratio < weight_floor, "clip_high": ratio > weight_cap}


def log_ratio(new: Tensor, old: Tensor) -> Tensor:
    return (new - old).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


def sequence_ratio(new: Tensor, inputs: LossInputs) -> Tensor:
    mean = inputs.sequence_mean(log_ratio(new, inputs.old))
    return mean.clamp(max=LARGEST_SEQUENCE_LOG_RATIO).exp()


def clipped(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float = 0.0, delta: float = 0.0
) -> Losses:
    """The larger of clipped and unclipped loss; `dual_clip` and `delta` bound it where A < 0 (0: off)."""
    low, high = 1 - clip_low, 1 + clip_high
    free = ratio.clamp(max=delta) if delta else ratio
    loss = (-advantages * free).maximum(-advantages * ratio.clamp(low, high))
    indicators = beyond(ratio, advantages, low, high)
    if dual_clip or delta:
        indicators["clip_dual"] = (advantages < 0) & (ratio > (delta or dual_clip))
    if dual_clip:
        most = -advantages * dual_clip
        loss = most.where((advantages < 0) & (loss > most), loss)
    return loss, indicators


def beyond(values: Tensor, advantages: Tensor, low: float, high: float) -> dict[str, Tensor]:
    """[T] bool masks: where a bound blocks the change that the advantage asks for."""
    return {"clip_low": (advantages < 0) & (values < low), "clip_high": (advantages > 0) & (values > high)}


def either(mask: Tensor, yes: float, no: float, *, like: Tensor) -> Tensor:
    return like.new_full((), yes).where(mask, like.new_full((), no))


# -- distance to the reference ---------------------------------------------------------------------


# As a loss its expected gradient is zero, so it may only be a penalty in the reward.
@add(KINDS, "u", in_loss=False)
def k1(new: Tensor, ref: Tensor) -> Tensor:
    return new - ref


@add(KINDS, "u^2 / 2")
def k2(new: Tensor, ref: Tensor) -> Tensor:
    return with_slope_of_k2((new - ref).detach().square() / 2, new, ref)


@add(KINDS, "exp(-u) - 1 + u")
def k3(new: Tensor, ref: Tensor, *, kl_clamp: Literal["bounded", "zero"] = "bounded") -> Tensor:
    gap = (new - ref).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    value = ((-gap).expm1() + gap).clamp(0, LARGEST_KL)
    if kl_clamp == "zero":
        return value
    # A clamped value has no gradient exactly where the policy is furthest away: keep a bounded one.
    slope = (-(-gap).expm1()).clamp(-LARGEST_KL, 1).detach()
    return _straight_through(value, slope, new)


def with_slope_of_k2(value: Tensor, new: Tensor, ref: Tensor) -> Tensor:
    return _straight_through(value, (new - ref).detach().clamp(-LARGEST_KL, LARGEST_KL), new)


def _straight_through(value: Tensor, slope: Tensor, new: Tensor) -> Tensor:
    return (new - new.detach()) * slope + value.detach()
