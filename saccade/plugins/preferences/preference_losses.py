"""Losses on preferences: one per pair or, for kto, per labelled response; to be minimised.

A loss is `f(inputs, *, options) -> (losses [P], {metric: values})`; only the log-probs of the
policy have a gradient, metrics have none. A step divides by the number of pairs of all its parts.
Knows nothing of models, batches or coefficients. In the formulas a log-ratio is the log-prob of a
response minus that of the reference; h = log-ratio of chosen - log-ratio of rejected; h_mean is the
same with each log-ratio over its own number of tokens. Axes: P pairs, S responses.

    >>> losses, metrics = PREFERENCES["dpo"].function(pairs, beta=0.1)
    >>> metrics["acc"]   # [P] bool; also margin, chosen, rejected: rewards as the loss sees them
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from saccade.algorithms.table import Entry, NotNegative, Smoothing
from saccade.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

Losses: TypeAlias = "tuple[Tensor, dict[str, Tensor]]"
Sides: TypeAlias = "tuple[Tensor, Tensor]"  # chosen and rejected, [P] each


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Log-probs summed over the trained tokens of a response, fp32 or wider."""

    chosen: Tensor  # [P]
    rejected: Tensor  # [P]
    chosen_length: Tensor  # [P] trained tokens, at least 1
    rejected_length: Tensor  # [P]
    ref_chosen: Tensor | None = None  # [P]; None: no reference was loaded
    ref_rejected: Tensor | None = None  # [P]

    def ratios(self) -> Sides:
        assert self.ref_chosen is not None and self.ref_rejected is not None, "no reference"
        return self.chosen - self.ref_chosen, self.rejected - self.ref_rejected

    def means(self, sides: Sides) -> Sides:
        """Per token."""
        return sides[0] / self.chosen_length, sides[1] / self.rejected_length


@dataclass(frozen=True, kw_only=True)
class Labelled:
    """Responses that were called good or bad on their own; log-probs as in `Pairs`."""

    logprobs: Tensor  # [S]
    ref: Tensor  # [S]
    desirable: Tensor  # [S] bool
    # Where a log-ratio counts as neutral: max(0, mean log-ratio of responses under the prompts of
    # others), over the whole step.
    z: Tensor  # [] 0-d


def dpo(pairs: Pairs, *, beta: float = 0.1) -> Losses:
    """arXiv 2305.18290."""
    margin, metrics = _compared(pairs.ratios(), beta)
    return negative_log_sigmoid(margin), metrics


def cdpo(pairs: Pairs, *, beta: float = 0.1, label_smoothing: Smoothing = 0.1) -> Losses:
    """A share of the labels is taken to be wrong (Mitchell 2023, a note on noisy preferences)."""
    margin, metrics = _compared(pairs.ratios(), beta)
    right, wrong = negative_log_sigmoid(margin), negative_log_sigmoid(-margin)
    return (1 - label_smoothing) * right + label_smoothing * wrong, metrics


def robust(pairs: Pairs, *, beta: float = 0.1, label_smoothing: Smoothing = 0.1) -> Losses:
    """In expectation dpo on clean labels, if that share is flipped (arXiv 2403.00409)."""
    if not 0 <= label_smoothing < 0.5:
        raise ConfigError(
            f"robust: label_smoothing={label_smoothing:g} must be at least 0 and less than 0.5, for example 0.1"
        )
    margin, metrics = _compared(pairs.ratios(), beta)
    right, wrong = negative_log_sigmoid(margin), negative_log_sigmoid(-margin)
    clean = (1 - label_smoothing) * right - label_smoothing * wrong
    return clean / (1 - 2 * label_smoothing), metrics


def ipo(pairs: Pairs, *, beta: float = 0.1) -> Losses:
    """A margin to reach instead of one to grow (arXiv 2310.12036), per token."""
    return _squared(pairs.means(pairs.ratios()), beta)


def ipo_sum(pairs: Pairs, *, beta: float = 0.1) -> Losses:
    """The same on whole responses: long ones reach the margin sooner."""
    return _squared(pairs.ratios(), beta)


def dpo_norm(pairs: Pairs, *, beta: float = 0.1) -> Losses:
    margin, metrics = _compared(pairs.means(pairs.ratios()), beta)
    return negative_log_sigmoid(margin), metrics


def reference_free(pairs: Pairs, *, beta: float = 0.1) -> Losses:
    margin, metrics = _compared((pairs.chosen, pairs.rejected), beta)
    return negative_log_sigmoid(margin), metrics


def hinge(pairs: Pairs, *, beta: float = 0.1) -> Losses:
    """arXiv 2305.10425."""
    margin, metrics = _compared(pairs.ratios(), beta)
    return (1 - margin).clamp(min=0), metrics


def simpo(pairs: Pairs, *, beta: float = 2.0, gamma: NotNegative = 1.0) -> Losses:
    """Log-probs per token, ahead by a margin (arXiv 2405.14734)."""
    margin, metrics = _compared(pairs.means((pairs.chosen, pairs.rejected)), beta)
    return negative_log_sigmoid(margin - gamma), metrics


def kto(
    labelled: Labelled, *, beta: float = 0.1, desirable_weight: NotNegative = 1.0, undesirable_weight: NotNegative = 1.0
) -> Losses:
    """Good or bad on its own, against a neutral log-ratio z (arXiv 2402.01306).

    Metrics are of the good (chosen) and of the bad (rejected) responses, so they differ in length.
    """
    good, ratio = labelled.desirable, labelled.logprobs - labelled.ref
    gain = beta * (ratio - labelled.z.detach())
    losses = (desirable_weight * (-gain).sigmoid()).where(good, undesirable_weight * gain.sigmoid())
    rewards = beta * ratio.detach()
    return losses, {"chosen": rewards[good], "rejected": rewards[~good]}


def negative_log_sigmoid(values: Tensor) -> Tensor:
    return (-values).logaddexp(values.new_zeros(()))


def _squared(sides: Sides, beta: float) -> Losses:
    margin, metrics = _compared(sides, beta)
    return ((margin - 0.5) / beta).square(), metrics


def _compared(sides: Sides, beta: float) -> Losses:
    """The margin between the rewards [P], and what is reported."""
    chosen, rejected = (beta * side for side in sides)
    margin = chosen - rejected
    metrics = {"chosen": chosen, "rejected": rejected, "margin": margin, "acc": margin > 0}
    return margin, {name: values.detach() for name, values in metrics.items()}


PREFERENCES: dict[str, Entry] = {
    "dpo": Entry(function=dpo, formula="-log sigmoid(beta h)"),
    "cdpo": Entry(function=cdpo, formula="-(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h), e = label_smoothing"),
    "robust": Entry(
        function=robust,
        formula="(-(1 - e) log sigmoid(beta h) + e log sigmoid(-beta h)) / (1 - 2 e), e = label_smoothing",
    ),
    "ipo": Entry(function=ipo, formula="(h_mean - 1 / (2 beta))^2"),
    "ipo_sum": Entry(function=ipo_sum, formula="(h - 1 / (2 beta))^2"),
    "dpo_norm": Entry(function=dpo_norm, formula="-log sigmoid(beta h_mean)"),
    "reference_free": Entry(
        function=reference_free, formula="-log sigmoid(beta h), h of log-probs without a reference"
    ),
    "hinge": Entry(function=hinge, formula="max(0, 1 - beta h)"),
    "simpo": Entry(
        function=simpo, formula="-log sigmoid(beta h_mean - gamma), h_mean of log-probs without a reference"
    ),
    "kto": Entry(
        function=kto,
        formula="1 - sigmoid(beta (log-ratio - z)) if desirable, else with the opposite sign; "
        "times the weight of the label",
    ),
}
WITHOUT_REFERENCE = frozenset({"reference_free", "simpo"})  # the others read `ratios`
UNPAIRED = frozenset({"kto"})  # reads `Labelled` in place of `Pairs`
