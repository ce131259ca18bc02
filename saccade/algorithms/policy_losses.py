"""Surrogates: one loss per token, to be minimised. Weights, masks and denominators come later.

A loss is `f(new, inputs, options) -> (loss [T], indicators {name: [T] bool})`; only `new` has a
gradient. Losses on whole sequences get their sums through `inputs.sequence_sum`, so they hold
wherever the tokens of a sequence lie. Knows nothing of masks, denominators or KL. Axes: T tokens,
S sequences.

    >>> loss, indicators = LOSSES["clip"].function(new, inputs, LossOptions(clip_high=0.28))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from saccade.algorithms.table import Entry

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_LOG_RATIO = 20.0
LARGEST_SEQUENCE_LOG_RATIO = 10.0


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None  # bound on the loss of negative advantages
    delta: float | None = None  # bound on the unclipped ratio
    weight_low: float = 0.0  # cispo: limits of the detached ratio
    weight_high: float = 5.0
    tau_positive: float = 1.0  # sapo: temperature of the gate, by sign of the advantage
    tau_negative: float = 1.05


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    old: Tensor  # [T]
    advantages: Tensor  # [T]
    sequence: Tensor  # [T] index of the sequence of each token
    sequences: int
    sequence_sum: Callable[[Tensor], Tensor]  # [T] -> [S]

    def sequence_mean(self, values: Tensor) -> Tensor:
        """[T] -> [T]: the mean over a sequence, at each of its tokens."""
        lengths = self.sequence_sum(values.detach().new_ones(len(values))).clamp(min=1)
        return (self.sequence_sum(values) / lengths)[self.sequence]


Losses: TypeAlias = "tuple[Tensor, dict[str, Tensor]]"


def clip(new: Tensor, inputs: LossInputs, options: LossOptions) -> Losses:
    """PPO (arXiv 1707.06347), with dual clip (1912.09729) or delta (2505.07291)."""
    return clipped(log_ratio(new, inputs.old).exp(), inputs.advantages, options)


def pg(new: Tensor, inputs: LossInputs, options: LossOptions) -> Losses:
    return -inputs.advantages * new, {}


def gspo(new: Tensor, inputs: LossInputs, options: LossOptions) -> Losses:
    """One ratio per sequence (arXiv 2507.18071)."""
    return clipped(sequence_ratio(new, inputs), inputs.advantages, options)


def gspo_token(new: Tensor, inputs: LossInputs, options: LossOptions) -> Losses:
    """The value of gspo with the gradient of each token, for advantages that differ by token."""
    ratio = sequence_ratio(new, inputs).detach() * (new - new.detach()).exp()
    return clipped(ratio, inputs.advantages, options)


def gmpo(new: Tensor, inputs: LossInputs, options: LossOptions) -> Losses:
    """Geometric mean of token ratios, each clipped in log space (arXiv 2507.20673)."""
    gap, positive = log_ratio(new, inputs.old), inputs.advantages > 0
    inside = gap.clamp(-options.clip_low, options.clip_high)
    pessimistic = gap.minimum(inside).where(positive, gap.maximum(inside))
    ratio = inputs.sequence_mean(pessimistic).clamp(max=LARGEST_SEQUENCE_LOG_RATIO).exp()
    low = (gap < -options.clip_low) & (inputs.advantages < 0)
    high = (gap > options.clip_high) & positive
    return -inputs.advantages * ratio, {"clip_low": low, "clip_high": high}


def cispo(new: Tensor, inputs: LossInputs, options: LossOptions) -> Losses:
    """The ratio is clipped as a weight, so no token loses its gradient (arXiv 2506.13585)."""
    ratio = log_ratio(new, inputs.old).exp().detach()
    weight = ratio.clamp(options.weight_low, options.weight_high)
    low, high = ratio < options.weight_low, ratio > options.weight_high
    return -inputs.advantages * new * weight, {"clip_low": low, "clip_high": high}


def sapo(new: Tensor, inputs: LossInputs, options: LossOptions) -> Losses:
    """A soft gate instead of a clip (arXiv 2511.20347)."""
    ratio = log_ratio(new, inputs.old).exp()
    tau = ratio.new_full((), options.tau_positive).where(
        inputs.advantages > 0, ratio.new_full((), options.tau_negative)
    )
    return -inputs.advantages * (4 / tau) * (tau * (ratio - 1)).sigmoid(), {}


def log_ratio(new: Tensor, old: Tensor) -> Tensor:
    return (new - old).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


def sequence_ratio(new: Tensor, inputs: LossInputs) -> Tensor:
    mean = inputs.sequence_mean(log_ratio(new, inputs.old))
    return mean.clamp(max=LARGEST_SEQUENCE_LOG_RATIO).exp()


def clipped(ratio: Tensor, advantages: Tensor, options: LossOptions) -> Losses:
    """The worse of clipped and unclipped, bounded where the advantage is negative."""
    negative = advantages < 0
    low, high = 1 - options.clip_low, 1 + options.clip_high
    free = ratio if options.delta is None else ratio.clamp(max=options.delta)
    loss = (-advantages * free).maximum(-advantages * ratio.clamp(low, high))
    indicators = {
        "clip_low": negative & (ratio < low),
        "clip_high": (advantages > 0) & (ratio > high),
    }
    bound = options.dual_clip if options.delta is None else options.delta
    if bound is not None:
        indicators["clip_dual"] = negative & (ratio > bound)
    if options.dual_clip is not None:
        loss = loss.minimum(-advantages * options.dual_clip).where(negative, loss)
    return loss, indicators


CLIP = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None, "delta": None}
GSPO_CLIP = {"clip_low": 3e-4, "clip_high": 4e-4}
LOSSES: dict[str, Entry] = {
    "clip": Entry(
        function=clip,
        formula="max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), r = exp(new - old)",
        options=CLIP,
    ),
    "pg": Entry(function=pg, formula="-A new"),
    "gspo": Entry(
        function=gspo,
        formula="clip loss with r = exp(mean over the sequence of new - old)",
        options=GSPO_CLIP,
        own_aggregation="seq_mean",
    ),
    "gspo_token": Entry(
        function=gspo_token,
        formula="clip loss with r = sg[exp(mean of new - old)] exp(new - sg[new])",
        options=GSPO_CLIP,
        own_aggregation="seq_mean",
    ),
    "gmpo": Entry(
        function=gmpo,
        formula="-A exp(mean over the sequence of new - old, clipped to [-clip_low, clip_high])",
        options={"clip_low": 0.4, "clip_high": 0.4},
        own_aggregation="seq_mean",
    ),
    "cispo": Entry(
        function=cispo,
        formula="-A new sg[clip(r, weight_low, weight_high)], r = exp(new - old)",
        options={"weight_low": 0.0, "weight_high": 5.0},
    ),
    "sapo": Entry(
        function=sapo,
        formula="-A (4 / tau) sigmoid(tau (r - 1)), tau by the sign of A, r = exp(new - old)",
        options={"tau_positive": 1.0, "tau_negative": 1.05},
    ),
}
