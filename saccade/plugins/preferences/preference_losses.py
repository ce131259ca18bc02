"""Preference losses: one value per pair or, for kto, per labelled response; to be minimised.

A formula is `f(inputs, *, options) -> (losses [P], {metric: values})`; only the log-probs of the
policy have a gradient, metrics have none. In the formulas a log-ratio is the log-prob of a response
under the policy minus that under the reference; h = log-ratio of chosen - log-ratio of rejected; h_mean
is the same with each log-ratio divided by the number of tokens of its response.

    loss = sum(losses of pairs) / pairs + nll_coef sum(-log-probs of chosen) / tokens of chosen

`PreferenceLoss` holds the denominators of the whole optimizer step, so the losses of micro-batches add up.
A pair is a group of two sequences, chosen (repeat 0) before rejected (repeat 1); for unpaired losses, repeat
0 is a good response and repeat 1 a bad one. Axes: R targets (predicted tokens), P pairs, S sequences.

    >>> losses, metrics = PREFERENCES["dpo"].function(pairs, beta=0.1)
    >>> metrics["accuracy"]   # [P] bool; also margin, reward_chosen, reward_rejected: as the loss sees them
    >>> trainer.train_step(batches, of_step(from_config(config.dpo), batches), lr=1e-6)
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from saccade.algorithms.objective import LossSums, mean_of
from saccade.algorithms.table import Entry, NotNegative, Smoothing, add, parsed
from saccade.config import Config, DpoConfig
from saccade.errors import ConfigError
from saccade.forest.batch import Batch
from saccade.trainer import MODEL_SCORING, ForwardModel, Objective

Losses = tuple[Tensor, dict[str, Tensor]]
Sides = tuple[Tensor, Tensor]  # chosen and rejected, [P] each
PREFERENCES: dict[str, Entry] = {}
CHOSEN, REJECTED = 0, 1  # repeats


# -- formulas --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Log-probs summed over the trained tokens of a response, fp32 or wider; chosen, then rejected."""

    policy: Sides
    lengths: Sides  # trained tokens, at least 1
    reference: Sides | None = None  # None: none was loaded

    def ratios(self) -> Sides:
        assert self.reference is not None, "no reference"
        return self.policy[0] - self.reference[0], self.policy[1] - self.reference[1]

    def means(self, sides: Sides) -> Sides:
        """Both sides divided by their numbers of tokens."""
        return sides[0] / self.lengths[0], sides[1] / self.lengths[1]


@dataclass(frozen=True, kw_only=True)
class Labelled:
    """Responses with a label of their own, good or bad; log-probs as in `Pairs`."""

    logprobs: Tensor  # [S]
    ref: Tensor  # [S]
    desirable: Tensor  # [S] bool
    # The neutral log-ratio: max(0, mean log-ratio of mismatched pairs of prompt and response) over the step.
    z: Tensor  # [] 0-d


@add(PREFERENCES, "-log sigmoid(beta h)")
def dpo(pairs: Pairs, *, beta: float = 0.1) -> Losses:
    """arXiv 2305.18290."""
    return _logistic(pairs.ratios(), beta)


@add(PREFERENCES, "-(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h), e = label_smoothing")
def cdpo(pairs: Pairs, *, beta: float = 0.1, label_smoothing: Smoothing = 0.1) -> Losses:
    """Assumes that a share `label_smoothing` of the labels is wrong (Mitchell 2023, a note on noisy preferences)."""
    margin, metrics = _compared(pairs.ratios(), beta)
    right, wrong = negative_log_sigmoid(margin), negative_log_sigmoid(-margin)
    return (1 - label_smoothing) * right + label_smoothing * wrong, metrics


@add(PREFERENCES, "(-(1 - e) log sigmoid(beta h) + e log sigmoid(-beta h)) / (1 - 2 e), e = label_smoothing")
def robust(pairs: Pairs, *, beta: float = 0.1, label_smoothing: Smoothing = 0.1) -> Losses:
    """If a share `label_smoothing` of labels is flipped, its mean is dpo's loss on clean labels (arXiv 2403.00409)."""
    margin, metrics = _compared(pairs.ratios(), beta)
    right, wrong = negative_log_sigmoid(margin), negative_log_sigmoid(-margin)
    clean = (1 - label_smoothing) * right - label_smoothing * wrong
    return clean / (1 - 2 * label_smoothing), metrics


@add(PREFERENCES, "(h_mean - 1 / (2 beta))^2")
def ipo(pairs: Pairs, *, beta: float = 0.1) -> Losses:
    """Regresses the margin per token onto a target instead of growing it without bound (arXiv 2310.12036)."""
    return _squared(pairs.means(pairs.ratios()), beta)


@add(PREFERENCES, "(h - 1 / (2 beta))^2")
def ipo_sum(pairs: Pairs, *, beta: float = 0.1) -> Losses:
    """ipo on summed log-probs: long responses reach the target margin sooner."""
    return _squared(pairs.ratios(), beta)


@add(PREFERENCES, "-log sigmoid(beta h_mean)")
def dpo_norm(pairs: Pairs, *, beta: float = 0.1) -> Losses:
    return _logistic(pairs.means(pairs.ratios()), beta)


@add(PREFERENCES, "-log sigmoid(beta h), h of log-probs without a reference")
def reference_free(pairs: Pairs, *, beta: float = 0.1) -> Losses:
    return _logistic(pairs.policy, beta)


@add(PREFERENCES, "max(0, 1 - beta h)")
def hinge(pairs: Pairs, *, beta: float = 0.1) -> Losses:
    """arXiv 2305.10425."""
    margin, metrics = _compared(pairs.ratios(), beta)
    return (1 - margin).clamp(min=0), metrics


@add(PREFERENCES, "-log sigmoid(beta h_mean - gamma), h_mean of log-probs without a reference")
def simpo(pairs: Pairs, *, beta: float = 2.0, gamma: NotNegative = 1.0) -> Losses:
    """Log-probs per token must differ by a margin gamma (arXiv 2405.14734)."""
    margin, metrics = _compared(pairs.means(pairs.policy), beta)
    return negative_log_sigmoid(margin - gamma), metrics


@add(
    PREFERENCES,
    "1 - sigmoid(beta (log-ratio - z)) if desirable, else with the opposite sign; times the weight of the label",
)
def kto(
    labelled: Labelled, *, beta: float = 0.1, desirable_weight: NotNegative = 1.0, undesirable_weight: NotNegative = 1.0
) -> Losses:
    """Responses labelled good or bad, compared with a neutral log-ratio z (arXiv 2402.01306).

    Metrics: the rewards of good (chosen) and bad (rejected) responses, whose numbers differ.
    """
    good, ratio = labelled.desirable, labelled.logprobs - labelled.ref
    gain = beta * (ratio - labelled.z.detach())
    losses = (desirable_weight * (-gain).sigmoid()).where(good, undesirable_weight * gain.sigmoid())
    rewards = beta * ratio.detach()
    return losses, {"reward_chosen": rewards[good], "reward_rejected": rewards[~good]}


def negative_log_sigmoid(values: Tensor) -> Tensor:
    return (-values).logaddexp(values.new_zeros(()))


def _logistic(sides: Sides, beta: float) -> Losses:
    margin, metrics = _compared(sides, beta)
    return negative_log_sigmoid(margin), metrics


def _squared(sides: Sides, beta: float) -> Losses:
    margin, metrics = _compared(sides, beta)
    return ((margin - 0.5) / beta).square(), metrics


def _compared(sides: Sides, beta: float) -> Losses:
    """Returns (margins between the rewards [P], metrics)."""
    chosen, rejected = (beta * side for side in sides)
    margin = chosen - rejected
    metrics = {"reward_chosen": chosen, "reward_rejected": rejected, "margin": margin, "accuracy": margin > 0}
    return margin, {name: values.detach() for name, values in metrics.items()}


WITHOUT_REFERENCE = frozenset({"reference_free", "simpo"})  # the others read `ratios`
UNPAIRED = frozenset({"kto"})  # reads `Labelled` in place of `Pairs`


def check(config: Config) -> Iterator[str]:
    """Problems of a config for preference training that show without data or weights."""
    dpo = config.dpo
    read = PREFERENCES[dpo.loss].options.keys() - {"beta"}
    for name in sorted(dpo.args.keys() - read):
        expected = f", which reads {', '.join(sorted(read))}" if read else ""
        yield f"dpo.args.{name}: has no effect with dpo.loss={dpo.loss}{expected}; remove it"
    try:
        parsed(PREFERENCES[dpo.loss], dpo.args, "dpo.args")
    except ConfigError as error:
        yield str(error)
    if "reference" in dpo.model_fields_set and dpo.loss in WITHOUT_REFERENCE:
        yield f"dpo.reference: has no effect with dpo.loss={dpo.loss}; remove it"


# -- one optimizer step ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PreferenceLoss:
    """A preference loss with its options and the denominators of one optimizer step."""

    loss: str
    options: Mapping[str, Any]
    nll_coef: float = 0.0
    count: int = 0  # pairs or, for an unpaired loss, responses
    chosen_tokens: int = 0
    z: float = 0.0  # the neutral log-ratio of kto
    role: ClassVar[str] = "policy"

    @property
    def whole(self) -> bool:
        """Whether the loss compares pairs, so that groups must not be split over batches."""
        return self.loss not in UNPAIRED

    @property
    def needs_reference(self) -> bool:
        return self.loss not in WITHOUT_REFERENCE

    def forward(self, trainer: ForwardModel, batch: Batch) -> Objective:
        new, _ = trainer.score(batch, MODEL_SCORING)
        sequence, chosen, lengths, ref = (
            None if array is None else torch.from_numpy(array).to(new.device)
            for array in (batch.sequence, _is_chosen(batch), batch.lengths, batch.ref_totals)
        )
        return partial(objective, self, new, sequence, chosen, lengths, ref)  # type: ignore[arg-type]


def from_config(config: DpoConfig) -> PreferenceLoss:
    options = parsed(PREFERENCES[config.loss], config.args, "dpo.args") | {"beta": config.beta}
    return PreferenceLoss(loss=config.loss, options=options, nll_coef=config.nll_coef)


def of_step(row: PreferenceLoss, batches: Sequence[Batch], *, z: float = 0.0) -> PreferenceLoss:
    """The loss with the denominators of all batches of an optimizer step."""
    tokens = sum(int(batch.lengths[_is_chosen(batch)].sum()) for batch in batches)
    responses = sum(len(batch.keys) for batch in batches)
    return replace(row, count=responses // 2 if row.whole else responses, chosen_tokens=tokens, z=z)


def _is_chosen(batch: Batch) -> np.ndarray:
    return np.array([repeat == CHOSEN for _, repeat in batch.keys])


def objective(
    row: PreferenceLoss, new: Tensor, sequence: Tensor, chosen: Tensor, lengths: Tensor, ref: Tensor | None
) -> tuple[Tensor, LossSums]:
    """Returns (loss, sums for the metrics) from the log-probs `new` [R]; `sequence` [R] is the sequence of each. Per
    sequence [S]: whether it is `chosen`, its number of tokens (`lengths`), its log-prob under the reference (`ref`).
    """
    # In float64: a log-ratio is the small difference of two sums over many tokens.
    totals = new.new_zeros(len(chosen), dtype=torch.float64).index_add(0, sequence, new.double())
    inputs: Pairs | Labelled
    if row.whole:
        policy, tokens = (totals[chosen], totals[~chosen]), (lengths[chosen], lengths[~chosen])
        reference = None if ref is None else (ref[chosen], ref[~chosen])
        inputs = Pairs(policy=policy, lengths=tokens, reference=reference)
    else:
        assert ref is not None, "this loss needs a reference"
        inputs = Labelled(logprobs=totals, ref=ref, desirable=chosen, z=totals.new_tensor(row.z))
    losses, found = PREFERENCES[row.loss].with_options(row.options)(inputs)
    nll = -totals[chosen].sum()
    loss = losses.sum() / row.count
    if row.nll_coef and row.chosen_tokens:  # a step of kto may have bad responses only
        loss = loss + row.nll_coef * nll / row.chosen_tokens
    means = {f"dpo/{name}": mean_of(values) for name, values in found.items()} | {
        "dpo/logp_chosen": mean_of(totals[chosen]),
        "dpo/logp_rejected": mean_of(totals[~chosen]),
        "dpo/nll": (nll.detach(), lengths[chosen].sum()),
        "dpo/length_chosen": mean_of(lengths[chosen]),
        "dpo/length_rejected": mean_of(lengths[~chosen]),
    }
    read = torch.tensor(len(new), device=new.device)
    return loss, LossSums(tokens=read, terms={"policy/loss": loss.detach()}, means=means)
