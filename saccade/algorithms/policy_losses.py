"""Surrogates: one loss per token, to be minimised. Weights, masks and denominators come later.

A loss is `f(new, inputs, *, options) -> (loss [T], indicators {name: [T] bool})`; only `new` has a
gradient. Losses on whole sequences get their sums through `inputs.sequence_sum`, so they hold
wherever the tokens of a sequence lie. Knows nothing of denominators or KL. In the formulas
r = exp(new - old) and sg is a stop-gradient. Axes: T tokens, S sequences.

    >>> loss, indicators = clip(new, inputs, clip_high=0.28)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from saccade.algorithms.covariance import most_covariant, some_covariant
from saccade.algorithms.table import Entry, NotNegative, Positive

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_LOG_RATIO = 20.0
LARGEST_SEQUENCE_LOG_RATIO = 10.0
SMALLEST_WEIGHT = math.exp(-LARGEST_LOG_RATIO)  # in place of 0 before a logarithm
SMALLEST_SEQUENCE_WEIGHT = 1e-8  # vespo


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """What is known of the tokens; 0 where a token is not live."""

    old: Tensor  # [T]
    advantages: Tensor  # [T]
    sequence: Tensor  # [T] index of the sequence of each token
    sequences: int
    live: Tensor  # [T] bool
    sequence_sum: Callable[[Tensor], Tensor]  # [T] -> [S]
    weights: Tensor | None = None  # [T] of the correction; None: ones
    rewards: Tensor | None = None  # [T] of the token's member, after shaping
    selected: Tensor | None = None  # [T] bool, from the `select` of the loss

    def sequence_total(self, values: Tensor) -> Tensor:
        """[T] -> [T]: the sum over the live tokens of a sequence, at each of its tokens."""
        return self.sequence_sum(values.where(self.live, 0.0))[self.sequence]

    def sequence_mean(self, values: Tensor) -> Tensor:
        lengths = self.sequence_total(values.detach().new_ones(len(values)))
        return self.sequence_total(values) / lengths.clamp(min=1)


Losses: TypeAlias = "tuple[Tensor, dict[str, Tensor]]"


def clip(
    new: Tensor,
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 0.0,
    delta: float = 0.0,
) -> Losses:
    """PPO (arXiv 1707.06347), with dual clip (1912.09729) or delta (2505.07291)."""
    ratio = log_ratio(new, inputs.old).exp()
    return clipped(ratio, inputs.advantages, clip_low, clip_high, dual_clip, delta)


def pg(new: Tensor, inputs: LossInputs) -> Losses:
    return -inputs.advantages * new, {}


def gspo(new: Tensor, inputs: LossInputs, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> Losses:
    """One ratio per sequence (arXiv 2507.18071)."""
    return clipped(sequence_ratio(new, inputs), inputs.advantages, clip_low, clip_high)


def gspo_token(new: Tensor, inputs: LossInputs, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> Losses:
    """The value of gspo with the gradient of each token, for advantages that differ by token."""
    ratio = sequence_ratio(new, inputs).detach() * (new - new.detach()).exp()
    return clipped(ratio, inputs.advantages, clip_low, clip_high)


def gmpo(new: Tensor, inputs: LossInputs, *, clip_low: float = 0.4, clip_high: float = 0.4) -> Losses:
    """Geometric mean of token ratios, each clipped in log space (arXiv 2507.20673)."""
    gap, positive = log_ratio(new, inputs.old), inputs.advantages > 0
    inside = gap.clamp(-clip_low, clip_high)
    pessimistic = gap.minimum(inside).where(positive, gap.maximum(inside))
    ratio = inputs.sequence_mean(pessimistic).clamp(max=LARGEST_SEQUENCE_LOG_RATIO).exp()
    return -inputs.advantages * ratio, _beyond(gap, inputs.advantages, -clip_low, clip_high)


def cispo(new: Tensor, inputs: LossInputs, *, weight_floor: NotNegative = 0.0, weight_cap: Positive = 5.0) -> Losses:
    """The ratio is clipped as a weight, so no token loses its gradient (arXiv 2506.13585)."""
    ratio = log_ratio(new, inputs.old).exp().detach()
    loss = -inputs.advantages * new * ratio.clamp(weight_floor, weight_cap)
    return loss, {"clip_low": ratio < weight_floor, "clip_high": ratio > weight_cap}


def sapo(new: Tensor, inputs: LossInputs, *, tau_positive: Positive = 1.0, tau_negative: Positive = 1.05) -> Losses:
    """A soft gate instead of a clip (arXiv 2511.20347)."""
    ratio = log_ratio(new, inputs.old).exp()
    tau = _either(inputs.advantages > 0, tau_positive, tau_negative, like=ratio)
    return -inputs.advantages * (4 / tau) * (tau * (ratio - 1)).sigmoid(), {}


def cpgd(
    new: Tensor,
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    drift_coef: NotNegative = 1e-3,
    drift_cap: Positive = 2.0,
) -> Losses:
    """The clip on log-ratios, and a pull back to the old policy (arXiv 2505.12504)."""
    gap, advantages = log_ratio(new, inputs.old), inputs.advantages
    low = math.log1p(-clip_low) if clip_low < 1 else -math.inf
    high = math.log1p(clip_high)
    gain = (gap * advantages).minimum(gap.clamp(low, high) * advantages)
    loss = drift_coef * _drift(new, gap.detach(), drift_cap) - gain
    return loss, _beyond(gap, advantages, low, high)


def _drift(new: Tensor, gap: Tensor, cap: float) -> Tensor:
    """KL(old, new) estimated at the token; the slope has a cap, so the pull stays bounded."""
    excess = gap.expm1()
    pull = excess.clamp(max=cap) * new
    return pull - pull.detach() + (excess - gap)


def kl_cov(new: Tensor, inputs: LossInputs, *, cov_coef: NotNegative = 1.0) -> Losses:
    """Tokens whose log-prob and advantage vary together most are held back (arXiv 2505.22617)."""
    assert inputs.selected is not None, "kl_cov needs its selection"
    gap = log_ratio(new, inputs.old)
    penalty = cov_coef * gap.abs().where(inputs.selected, 0.0)
    return penalty - inputs.advantages * gap.exp(), {"selected": inputs.selected}


def clip_cov(new: Tensor, inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2) -> Losses:
    """The clip loss without some of those tokens (arXiv 2505.22617)."""
    assert inputs.selected is not None, "clip_cov needs its selection"
    loss, indicators = clip(new, inputs, clip_low=clip_low, clip_high=clip_high)
    return loss.where(~inputs.selected, 0.0), indicators | {"selected": inputs.selected}


def topr(new: Tensor, inputs: LossInputs, *, topr_split: Literal["reward", "advantage"] = "reward") -> Losses:
    """Bad samples weigh at most their ratio, good ones fully (arXiv 2503.14286)."""
    sign = inputs.rewards if topr_split == "reward" else inputs.advantages
    assert sign is not None, "topr by reward needs rewards"
    ratio = log_ratio(new, inputs.old).exp().detach()
    weight = ratio.clamp(max=1).where(sign <= 0, 1.0)
    return -inputs.advantages * new * weight, {}


def kimi(
    new: Tensor, inputs: LossInputs, *, kimi_tau: NotNegative = 0.1, kimi_level: Literal["token", "sequence"] = "token"
) -> Losses:
    """Policy gradient with a squared log-ratio (arXiv 2501.12599; by token: 2405.19107).

    The square of a sequence is spread evenly over its tokens: their sum holds it once.
    """
    gap = new - inputs.old  # not exponentiated, so it needs no clamp and always pulls back
    of_sequence = kimi_level == "sequence"
    square = inputs.sequence_total(gap) * inputs.sequence_mean(gap) if of_sequence else gap.square()
    return kimi_tau / 2 * square - inputs.advantages * new, {}


def inside_tv(new: Tensor, old: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Whether the probability has not yet moved too far the way the advantage pushes it."""
    change = new.exp() - old.exp()
    return (change <= clip_high).where(advantages > 0, change >= -clip_low)


def inside_kl(new: Tensor, old: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """The same by the KL between "this token or another" before and now."""
    positive = advantages > 0
    rest_old, rest_new = ((-x.clamp(max=0).expm1()).clamp(min=SMALLEST_WEIGHT) for x in (old, new))
    distance = old.exp() * (old - new) + rest_old * (rest_old.log() - rest_new.log())
    near = distance <= _either(positive, clip_high, clip_low, like=new)
    return near | (new <= old).where(positive, new >= old)


def _dppo(inside: Callable[..., Tensor]) -> Callable[..., Losses]:
    """A trust region on probabilities instead of ratios (arXiv 2602.04879)."""

    def loss(
        new: Tensor, inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2, weight_cap: Positive = 20.0
    ) -> Losses:
        advantages = inputs.advantages
        trusted = inside(new.detach(), inputs.old, advantages, clip_low, clip_high)
        weight = log_ratio(new, inputs.old).exp().detach().clamp(max=weight_cap).where(trusted, 0.0)
        stopped = {"clip_low": ~trusted & (advantages < 0), "clip_high": ~trusted & (advantages > 0)}
        return -advantages * new * weight, stopped

    return loss


def vespo(
    new: Tensor,
    inputs: LossInputs,
    *,
    vespo_positive: tuple[float, float] = (2.0, 3.0),
    vespo_negative: tuple[float, float] = (3.0, 2.0),
) -> Losses:
    """Sequence weights W, corrections included, through a gate (k, lambda) that is 1 at W = 1."""
    gap = log_ratio(new, inputs.old).detach()
    if inputs.weights is not None:
        gap = gap + inputs.weights.clamp(min=SMALLEST_WEIGHT).log()
    log_weight = inputs.sequence_total(gap).clamp(math.log(SMALLEST_SEQUENCE_WEIGHT), LARGEST_LOG_RATIO)
    positive = inputs.advantages >= 0
    k = _either(positive, vespo_positive[0], vespo_negative[0], like=gap)
    rate = _either(positive, vespo_positive[1], vespo_negative[1], like=gap)
    gate = (k * log_weight - rate * log_weight.expm1()).exp()
    return -inputs.advantages * new * gate, {}


# -- shared ----------------------------------------------------------------------------------------


def log_ratio(new: Tensor, old: Tensor) -> Tensor:
    return (new - old).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


def sequence_ratio(new: Tensor, inputs: LossInputs) -> Tensor:
    mean = inputs.sequence_mean(log_ratio(new, inputs.old))
    return mean.clamp(max=LARGEST_SEQUENCE_LOG_RATIO).exp()


def clipped(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float = 0.0, delta: float = 0.0
) -> Losses:
    """The worse of clipped and unclipped; `dual_clip` and `delta` bound negative ones (0: off)."""
    low, high = 1 - clip_low, 1 + clip_high
    free = ratio.clamp(max=delta) if delta else ratio
    loss = (-advantages * free).maximum(-advantages * ratio.clamp(low, high))
    indicators = _beyond(ratio, advantages, low, high)
    if dual_clip or delta:
        indicators["clip_dual"] = (advantages < 0) & (ratio > (delta or dual_clip))
    if dual_clip:
        most = -advantages * dual_clip
        loss = most.where((advantages < 0) & (loss > most), loss)
    return loss, indicators


def _beyond(values: Tensor, advantages: Tensor, low: float, high: float) -> dict[str, Tensor]:
    """Where a bound stops what the advantage asks for."""
    return {"clip_low": (advantages < 0) & (values < low), "clip_high": (advantages > 0) & (values > high)}


def _either(mask: Tensor, yes: float, no: float, *, like: Tensor) -> Tensor:
    return like.new_full((), yes).where(mask, like.new_full((), no))


LOSSES: dict[str, Entry] = {
    "clip": Entry(function=clip, formula="max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), r = exp(new - old)"),
    "pg": Entry(function=pg, formula="-A new"),
    "gspo": Entry(
        function=gspo, formula="clip loss with r = exp(mean over the sequence of new - old)", own_aggregation="seq_mean"
    ),
    "gspo_token": Entry(
        function=gspo_token,
        formula="clip loss with r = sg[exp(mean of new - old)] exp(new - sg[new])",
        own_aggregation="seq_mean",
    ),
    "luspo": Entry(
        function=gspo,
        formula="clip loss with r = exp(mean over the sequence of new - old), summed by sequence",
        own_aggregation="seq_sum",
    ),
    "gmpo": Entry(
        function=gmpo,
        formula="-A exp(mean over the sequence of new - old, clipped to [-clip_low, clip_high])",
        own_aggregation="seq_mean",
    ),
    "cispo": Entry(function=cispo, formula="-A new sg[clip(r, weight_floor, weight_cap)]"),
    "sapo": Entry(function=sapo, formula="-A (4 / tau) sigmoid(tau (r - 1)), tau by the sign of A"),
    "cpgd": Entry(
        function=cpgd, formula="max(-A d, -A clip(d, ln(1 - clip_low), ln(1 + clip_high))) + drift, d = new - old"
    ),
    "kl_cov": Entry(
        function=kl_cov, formula="-A r, plus |new - old| on the tokens of largest covariance", select=most_covariant
    ),
    "clip_cov": Entry(
        function=clip_cov, formula="clip loss, 0 on some tokens of large covariance", select=some_covariant
    ),
    "topr": Entry(function=topr, formula="-A new, times sg[min(r, 1)] on bad samples"),
    "kimi": Entry(function=kimi, formula="-A new + tau / 2 (new - old)^2"),
    "dro": Entry(function=kimi, formula="-A new + tau / 2 (new - old)^2"),
    "dppo_tv": Entry(
        function=_dppo(inside_tv), formula="-A new sg[min(r, cap)], 0 where the probability moved too far"
    ),
    "dppo_kl": Entry(function=_dppo(inside_kl), formula="-A new sg[min(r, cap)], 0 where the binary KL is too large"),
    "vespo": Entry(
        function=vespo,
        formula="-A new sg[W^k exp(lambda (1 - W))], W = product of r w over the sequence",
        applies_weights=True,
    ),
}
