"""Less common policy losses, KL distances, aggregations and corrections, and the selection of tokens that some losses
treat differently.

The covariance of a token is (A - mean A)(log-prob - mean log-prob), over the whole optimizer step
(arXiv 2505.22617). Random choices take the tokens with the smallest `noise`, a hash of the token's identity,
so that neither batching nor order changes them. Axis: T tokens.

    >>> loss, indicators = LOSSES["sapo"].function(new, inputs)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from saccade.algorithms import policy_losses as usual
from saccade.algorithms.aggregation import inverse
from saccade.algorithms.corrections import LARGEST_EXPONENT, Correction, Mismatch, Statistic, band, token, unjudged
from saccade.algorithms.filters import share
from saccade.algorithms.policy_losses import Losses, LossInputs, SelectionInputs, either, log_ratio
from saccade.algorithms.table import Entry, NotNegative, Positive, PositiveShare, Share, Width, add

if TYPE_CHECKING:
    from torch import Tensor

ROWS: dict[str, Entry] = {}

SMALLEST_SEQUENCE_WEIGHT = 1e-8  # lower bound of W in vespo
_ANCHORED = "a regression of new - old on A / tau needs no weights"


@add(ROWS, "-A exp(mean over the sequence of new - old, clipped to [-clip_low, clip_high])", own_aggregation="seq_mean")
def gmpo(new: Tensor, inputs: LossInputs, *, clip_low: Width = 0.4, clip_high: Width = 0.4) -> Losses:
    """Geometric mean of token ratios, each clipped in log space (arXiv 2507.20673)."""
    gap, positive = log_ratio(new, inputs.old), inputs.advantages > 0
    inside = gap.clamp(-clip_low, clip_high)
    pessimistic = gap.minimum(inside).where(positive, gap.maximum(inside))
    ratio = inputs.sequence_mean(pessimistic).clamp(max=usual.LARGEST_SEQUENCE_LOG_RATIO).exp()
    return -inputs.advantages * ratio, usual.beyond(gap, inputs.advantages, -clip_low, clip_high)


@add(ROWS, "-A (4 / tau) sigmoid(tau (r - 1)), tau by the sign of A")
def sapo(new: Tensor, inputs: LossInputs, *, tau_positive: Positive = 1.0, tau_negative: Positive = 1.05) -> Losses:
    """A soft gate instead of a clip (arXiv 2511.20347)."""
    ratio = log_ratio(new, inputs.old).exp()
    tau = either(inputs.advantages > 0, tau_positive, tau_negative, like=ratio)
    return -inputs.advantages * (4 / tau) * (tau * (ratio - 1)).sigmoid(), {}


@add(ROWS, "max(-A d, -A clip(d, ln(1 - clip_low), ln(1 + clip_high))) + drift, d = new - old", ratio=False)
def cpgd(
    new: Tensor,
    inputs: LossInputs,
    *,
    clip_low: Width = 0.2,
    clip_high: Width = 0.2,
    drift_coef: NotNegative = 1e-3,
    drift_cap: Positive = 2.0,
) -> Losses:
    """Clips log-ratios and adds a penalty on the drift from the old policy (arXiv 2505.12504)."""
    gap, advantages = log_ratio(new, inputs.old), inputs.advantages
    low = math.log1p(-clip_low) if clip_low < 1 else -math.inf
    high = math.log1p(clip_high)
    gain = (gap * advantages).minimum(gap.clamp(low, high) * advantages)
    excess = gap.detach().expm1()
    pull = excess.clamp(max=drift_cap) * new
    drift = pull - pull.detach() + (excess - gap.detach())  # estimate of KL(old, new); its gradient is capped
    return drift_coef * drift - gain, usual.beyond(gap, advantages, low, high)


@add(ROWS, "-A new, times sg[min(r, 1)] on bad samples", older="bad samples weigh min(r, 1), good ones are imitated")
def topr(new: Tensor, inputs: LossInputs, *, topr_split: Literal["reward", "advantage"] = "reward") -> Losses:
    """Bad samples get the weight min(ratio, 1), good ones 1 (arXiv 2503.14286)."""
    sign = inputs.rewards if topr_split == "reward" else inputs.advantages
    assert sign is not None, "topr by reward needs rewards"
    ratio = log_ratio(new, inputs.old).exp().detach()
    weight = ratio.clamp(max=1).where(sign <= 0, 1.0)
    return -inputs.advantages * new * weight, {}


@add(ROWS, "-A new + tau / 2 (new - old)^2", name="dro", older=_ANCHORED)
@add(ROWS, "-A new + tau / 2 (new - old)^2", older=_ANCHORED)
def kimi(
    new: Tensor, inputs: LossInputs, *, kimi_tau: NotNegative = 0.1, kimi_level: Literal["token", "sequence"] = "token"
) -> Losses:
    """Policy gradient with a squared log-ratio (arXiv 2501.12599; by token: 2405.19107).

    By sequence, the square of the sequence's log-ratio is divided evenly among its tokens.
    """
    gap = new - inputs.old  # not clamped: it is not exponentiated, and its gradient must not vanish
    of_sequence = kimi_level == "sequence"
    square = inputs.sequence_total(gap) * inputs.sequence_mean(gap) if of_sequence else gap.square()
    return kimi_tau / 2 * square - inputs.advantages * new, {}


def _dppo(inside: Callable[..., Tensor]) -> Callable[..., Losses]:
    """A loss with a trust region on probabilities instead of ratios (arXiv 2602.04879)."""

    def loss(
        new: Tensor, inputs: LossInputs, *, clip_low: Width = 0.2, clip_high: Width = 0.2, weight_cap: Positive = 20.0
    ) -> Losses:
        advantages = inputs.advantages
        trusted = inside(new.detach(), inputs.old, advantages, clip_low, clip_high)
        weight = log_ratio(new, inputs.old).exp().detach().clamp(max=weight_cap).where(trusted, 0.0)
        stopped = {"clip_low": ~trusted & (advantages < 0), "clip_high": ~trusted & (advantages > 0)}
        return -advantages * new * weight, stopped

    return loss


def inside_tv(new: Tensor, old: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Whether the change of the probability in the direction of the advantage is within bounds."""
    change = new.exp() - old.exp()
    return (change <= clip_high).where(advantages > 0, change >= -clip_low)


def inside_kl(new: Tensor, old: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """The same test by the KL between the binary distributions (this token, any other) of old and new."""
    positive = advantages > 0
    rest_old, rest_new = ((-x.clamp(max=0).expm1()).clamp(min=usual.SMALLEST_WEIGHT) for x in (old, new))
    distance = old.exp() * (old - new) + rest_old * (rest_old.log() - rest_new.log())
    near = distance <= either(positive, clip_high, clip_low, like=new)
    return near | (new <= old).where(positive, new >= old)


_FORMULA, _TRUSTED = "-A new sg[min(r, cap)], 0 where the", "r and the mask are against the policy that sampled"
add(ROWS, f"{_FORMULA} probability moved too far", name="dppo_tv", older=_TRUSTED)(_dppo(inside_tv))
add(ROWS, f"{_FORMULA} binary KL is too large", name="dppo_kl", older=_TRUSTED)(_dppo(inside_kl))


@add(ROWS, "-A new sg[W^k exp(lambda (1 - W))], W = product of r w over the sequence", applies_weights=True)
def vespo(
    new: Tensor,
    inputs: LossInputs,
    *,
    vespo_positive: tuple[float, float] = (2.0, 3.0),
    vespo_negative: tuple[float, float] = (3.0, 2.0),
) -> Losses:
    """A gate on the sequence weight W, corrections included; (k, lambda) by the sign of A; the gate is 1 at W = 1."""
    gap = log_ratio(new, inputs.old).detach()
    if inputs.weights is not None:
        gap = gap + inputs.weights.clamp(min=usual.SMALLEST_WEIGHT).log()
    log_weight = inputs.sequence_total(gap).clamp(math.log(SMALLEST_SEQUENCE_WEIGHT), usual.LARGEST_LOG_RATIO)
    positive = inputs.advantages >= 0
    k = either(positive, vespo_positive[0], vespo_negative[0], like=gap)
    rate = either(positive, vespo_positive[1], vespo_negative[1], like=gap)
    gate = (k * log_weight - rate * log_weight.expm1()).exp()
    return -inputs.advantages * new * gate, {}


@add(ROWS, "clip loss with r = sg[exp(mean of new - old)] exp(new - sg[new])", own_aggregation="seq_mean")
def gspo_token(new: Tensor, inputs: LossInputs, *, clip_low: Share = 3e-4, clip_high: Width = 4e-4) -> Losses:
    """The value of gspo with the gradient of each token, for advantages that differ by token."""
    ratio = usual.sequence_ratio(new, inputs).detach() * (new - new.detach()).exp()
    return usual.clipped(ratio, inputs.advantages, clip_low, clip_high)


# -- distance to the reference ---------------------------------------------------------------------


# Not usable as a loss: the gradient of abs has only a sign.
@add(ROWS, "|u|", name="abs", in_loss=False)
def absolute(new: Tensor, ref: Tensor) -> Tensor:
    return (new - ref).abs()


@add(ROWS, "u, with the gradient of k2", name="k1+")
def k1_plus(new: Tensor, ref: Tensor) -> Tensor:
    return usual.with_slope_of_k2(usual.k1(new, ref), new, ref)


@add(ROWS, "exp(-u) - 1 + u, with the gradient of k2", name="k3+")
def k3_plus(new: Tensor, ref: Tensor) -> Tensor:
    return usual.with_slope_of_k2(usual.k3(new, ref), new, ref)


# -- covariance of advantage and log-prob ----------------------------------------------------------


def _centred(values: Tensor) -> Tensor:
    # Sorted, so that the mean, and with it the ranking of near ties, is bitwise independent of the order of tokens.
    return values - values.sort().values.mean()


def covariance(inputs: SelectionInputs) -> Tensor:
    return _centred(inputs.advantages) * _centred(inputs.new)


def _first(inputs: SelectionInputs, ranked: Tensor, fraction: float) -> Tensor:
    """[T] bool: the first `fraction` of all tokens in the order of `ranked` (indices)."""
    chosen = ranked[: share(fraction, len(inputs.new))]
    return inputs.noise.new_zeros(len(inputs.noise)).index_fill(0, chosen, 1).bool()


def most_covariant(inputs: SelectionInputs, *, cov_fraction: PositiveShare = 2e-4) -> Tensor:
    shuffled = inputs.noise.argsort(stable=True)
    ranked = shuffled[covariance(inputs)[shuffled].argsort(descending=True, stable=True)]
    return _first(inputs, ranked, cov_fraction)


def some_covariant(
    inputs: SelectionInputs,
    *,
    clip_low: Width = 0.2,
    clip_high: Width = 0.2,
    cov_fraction: PositiveShare = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
) -> Tensor:
    """A random share of the step's tokens, from those with a covariance in (cov_low, cov_high) and not clipped."""
    found, excess = covariance(inputs), log_ratio(inputs.new, inputs.old).expm1()
    stopped = usual.beyond(excess, inputs.advantages, -clip_low, clip_high)
    inside = (found > cov_low) & (found < cov_high) & ~stopped["clip_low"] & ~stopped["clip_high"]
    shuffled = inputs.noise.argsort(stable=True)
    return _first(inputs, shuffled[inside[shuffled]], cov_fraction)


@add(ROWS, "-A r, plus |new - old| on the tokens of largest covariance", select=most_covariant)
def kl_cov(new: Tensor, inputs: LossInputs, *, cov_coef: NotNegative = 1.0) -> Losses:
    """A penalty on the drift of the tokens with the largest covariance (arXiv 2505.22617)."""
    assert inputs.selected is not None, "kl_cov needs its selection"
    gap = log_ratio(new, inputs.old)
    penalty = cov_coef * gap.abs().where(inputs.selected, 0.0)
    return penalty - inputs.advantages * gap.exp(), {"selected": inputs.selected}


@add(ROWS, "clip loss, 0 on some tokens of large covariance", select=some_covariant)
def clip_cov(new: Tensor, inputs: LossInputs, *, clip_low: Width = 0.2, clip_high: Width = 0.2) -> Losses:
    """The clip loss without some tokens of large covariance (arXiv 2505.22617)."""
    assert inputs.selected is not None, "clip_cov needs its selection"
    loss, indicators = usual.clip(new, inputs, clip_low=clip_low, clip_high=clip_high)
    return loss.where(~inputs.selected, 0.0), indicators | {"selected": inputs.selected}


# -- aggregations ----------------------------------------------------------------------------------


@add(ROWS, "mean over trajectories of their token mean")
def sample_mean(lengths: Tensor, trajectory: Tensor, group: Tensor) -> Tensor:
    """Token mean over all sequences of a trajectory, then mean over trajectories."""
    return _pooled_mean(lengths, trajectory)


@add(ROWS, "mean over groups of their token mean")
def group_mean(lengths: Tensor, trajectory: Tensor, group: Tensor) -> Tensor:
    return _pooled_mean(lengths, group)


@add(ROWS, "sum(l)")
def token_sum(lengths: Tensor, trajectory: Tensor, group: Tensor) -> Tensor:
    return inverse(lengths.new_ones(()).expand_as(lengths), lengths)


def _pooled_mean(lengths: Tensor, pool: Tensor) -> Tensor:
    names, index = pool.unique(return_inverse=True)
    tokens = lengths.new_zeros(len(names)).index_add(0, index, lengths)
    return inverse((tokens > 0).sum() * tokens[index], lengths)


# -- corrections: rejection by a statistic of delta, and opsm, which is computed at each update ------


@add(ROWS, "sequences with low <= exp(mean of delta) <= high")
def seq_mask(mismatch: Mismatch, *, low: NotNegative = 0.99, high: NotNegative = 1.01) -> Correction:
    return Correction(keep=band(Mismatch.mean, mismatch, low, high))


@add(ROWS, "w = exp(delta), sequences with low <= exp(mean of delta) <= high", weighs=True, masks=True)
def seq_mask_tis(mismatch: Mismatch, *, low: NotNegative = 0.99, high: NotNegative = 1.01) -> Correction:
    return Correction(weights=mismatch.ratio, keep=band(Mismatch.mean, mismatch, low, high))


def _reject_ratio(statistic: Statistic) -> Callable[..., Correction]:
    def reject(mismatch: Mismatch, *, low: NotNegative, high: NotNegative) -> Correction:
        return Correction(keep=band(statistic, mismatch, low, high))

    return reject


def _reject_distance(statistic: Statistic, distance: Callable[[Tensor], Tensor]) -> Callable[..., Correction]:
    def reject(mismatch: Mismatch, *, high: NotNegative) -> Correction:
        near = statistic(mismatch, distance(mismatch.delta)) <= high
        return Correction(keep=near | unjudged(statistic, mismatch))

    return reject


@add(ROWS, "no sequence with A < 0 and mean of rollout - new > threshold", each_update=True)
def opsm(
    new: Tensor,  # [T]
    rollout: Tensor,  # [T] NaN where unscored
    advantages: Tensor,  # [T]
    sequence_mean: Callable[[Tensor], Tensor],  # [T] -> [T] over the live tokens of a sequence
    *,
    threshold: Positive,
) -> Tensor:
    """[T] bool: False for sequences with negative advantage whose log-probs have dropped since the rollout."""
    scored = rollout.isfinite()
    gap = rollout.where(scored, 0.0) - new.detach().where(scored, 0.0)
    drifted = sequence_mean(gap) > threshold * sequence_mean(scored.to(new.dtype))
    return ~drifted | (sequence_mean(advantages) >= 0)


def _k3(delta: Tensor) -> Tensor:
    gap = delta.clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT)
    return gap.expm1() - gap


STATISTICS = {"token": token, "seq_sum": Mismatch.total, "seq_mean": Mismatch.mean, "seq_max": Mismatch.largest}
DISTANCES = {"k2": (lambda delta: delta.square() / 2, "delta^2 / 2"), "k3": (_k3, "exp(delta) - 1 - delta")}
for _level, _statistic in STATISTICS.items():
    if _level != "seq_max":  # a maximum cannot be compared with a lower bound
        add(ROWS, f"low <= exp(delta by {_level}) <= high", name=f"reject.{_level}.k1")(_reject_ratio(_statistic))
    for _kind, (_distance, _text) in DISTANCES.items():
        _reject = _reject_distance(_statistic, _distance)
        add(ROWS, f"{_text} by {_level} <= high", name=f"reject.{_level}.{_kind}")(_reject)
