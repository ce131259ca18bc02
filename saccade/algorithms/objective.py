"""Losses of one micro-batch (policy, critic, demonstrations) and the sums for their metrics, which stay
on the device until the step is over.

    policy  sum(l k w scale) + beta sum(kl scale) - c_H sum(H scale)
    critic  1/2 sum(max((V - Ret)^2, (V_old + clip(V - V_old) - Ret)^2) scale)
    demonstrations  sum(l scale),  l = -log p of the token

Scales hold the denominators of the whole optimizer step, so micro-losses simply add up. Tokens
with scale 0 are not live: nothing about them, not even NaN, reaches the loss or a metric. Knows
nothing of models, ranks or where the log-probs came from. Axis: T tokens.

    >>> loss, sums = objective(algorithm, new, entropy, inputs)
    >>> to_metrics([sums]).means()["policy/ratio_mean"]
    1.0
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from saccade.algorithms.corrections import LARGEST_EXPONENT, apply, measure
from saccade.algorithms.policy_losses import KINDS, LossInputs, log_ratio
from saccade.algorithms.resolved_algorithm import Algorithm
from saccade.algorithms.table import Entry
from saccade.types import Metrics

SQUARES = "is_weight_square"


@dataclass(frozen=True, kw_only=True)
class LossSums:
    """Sums for the metrics of one micro-batch; 0-d tensors."""

    tokens: Tensor  # live ones; their share of the step's is the count of each term in Metrics
    terms: Mapping[str, Tensor]  # of the loss; over all micro-batches they add up to the step's
    means: Mapping[str, tuple[Tensor, Tensor]]  # (sum, count)
    maxima: Mapping[str, Tensor] = field(default_factory=dict)  # -inf without tokens


def to_metrics(sums: Sequence[LossSums], total: Callable[[Counter[str]], Counter[str]] = Counter) -> Metrics:
    """Metrics of all micro-batches of an optimizer step, with one device synchronisation. `total` sums
    counts over the processes that share the step, so that their metrics can be merged.
    """
    metrics = Metrics()
    pairs = [tensor for one in sums for pair in one.means.values() for tensor in pair]
    others = [tensor for one in sums for tensor in (one.tokens, *one.terms.values(), *one.maxima.values())]
    tensors = {id(tensor): tensor for tensor in pairs + others}
    listed = torch.stack([tensor.to(torch.float64) for tensor in tensors.values()]).tolist() if tensors else []
    number = dict(zip(tensors, listed, strict=True))
    whole = Counter[str]()
    for one in sums:
        whole.update(dict.fromkeys(one.terms, number[id(one.tokens)]))
    whole = total(whole)
    for one in sums:
        for name, term in one.terms.items():
            share = number[id(one.tokens)] / whole[name] if whole[name] else 0.0
            metrics.add(name, number[id(term)], share)
        for name, (value, count) in one.means.items():
            metrics.add(name, number[id(value)], number[id(count)])
        for name, largest in one.maxima.items():
            if number[id(largest)] != -torch.inf:
                metrics.add_max(name, number[id(largest)])
    return metrics


def mean_of(values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (sum, count)."""
    return values.detach().sum(), torch.tensor(len(values), device=values.device)


def objective(algorithm: Algorithm, new: Tensor, entropy: Tensor | None, inputs: LossInputs) -> tuple[Tensor, LossSums]:
    """Returns the loss of a micro-batch and the sums for its metrics. Gradients flow into `new` [R], the current
    log-probs, and with an entropy bonus into `entropy` [R].
    """
    if algorithm.old == "rollout":
        assert inputs.rollout is not None, "old=rollout needs rollout log-probs"
        inputs = replace(inputs, old=inputs.rollout.where(~inputs.rollout.isnan(), new.detach()))
    if algorithm.in_loss:
        inputs = _corrected(inputs, algorithm.in_loss)
    live, scales, inputs = inputs.live, inputs.scales, inputs.only_live()
    new = new.where(live, 0.0)
    losses, indicators = algorithm.loss.call(new, inputs)
    dropped = {
        f"{c.name}_dropped": ~c(new.detach(), inputs.rollout, inputs.advantages, inputs.sequence_mean)
        for c in algorithm.corrections
        if c.each_update
    }
    weights = None if algorithm.loss.applies_weights else inputs.weights
    for factor in (inputs.keep, weights, *(~d for d in dropped.values())):
        losses = losses if factor is None else losses * factor
    # A clamp or a selection may hide a log-prob that is not finite. Adding 0 times it gives NaN, so that
    # the update is skipped; for finite log-probs it adds 0.
    terms = {"policy/pg_loss": (losses * scales).sum() + 0.0 * new.detach().sum()}
    loss = terms["policy/pg_loss"]

    distance = None
    if algorithm.needs_reference and inputs.ref is not None:
        distance = algorithm.divergence(new, inputs.ref)
    if algorithm.kl_in_loss:
        assert distance is not None, "a KL in the loss needs reference log-probs"
        ratio = log_ratio(new, inputs.old).exp() if algorithm.kl.ratio_correct else 1.0
        terms["policy/kl_loss"] = (ratio * distance * scales).sum()
        loss = loss + algorithm.kl.coef * terms["policy/kl_loss"]
    if algorithm.entropy_coef != 0:
        assert entropy is not None, "an entropy bonus needs the entropy"
        bonus = (entropy.where(live, 0.0) * scales).sum()
        loss = loss - algorithm.entropy_coef * bonus
    terms["policy/loss"] = loss
    # With old=rollout the old log-probs are the engine's, so the trainer's are the current ones.
    trainer = new.detach() if algorithm.old == "rollout" else inputs.old
    sums = _sums(terms, indicators | dropped, inputs, new.detach(), trainer, entropy, distance)
    return loss, _with_weights(sums, inputs) if algorithm.in_loss else sums


@torch.no_grad()
def _corrected(inputs: LossInputs, chosen: Sequence[Entry]) -> LossInputs:
    """Add weights and masks for the gap between the log-probs of the engine and the trainer."""
    assert inputs.rollout is not None, "corrections need rollout log-probs"
    where: dict[str, Any] = {name: getattr(inputs, name) for name in ("live", "sequence", "sequences", "ages")}
    found = apply(chosen, measure(inputs.old.double(), inputs.rollout.double(), **where))
    ones = torch.ones_like(inputs.old)
    weights, keep = (ones if each is None else each.to(ones.dtype) for each in (found.weights, found.keep))
    return replace(inputs, weights=weights, keep=keep)


def _with_weights(sums: LossSums, inputs: LossInputs) -> LossSums:
    assert inputs.weights is not None and inputs.keep is not None, "they were computed here"
    means, maxima = dict(sums.means), dict(sums.maxima)
    values = {"is_weight_mean": inputs.weights, SQUARES: inputs.weights.square(), "masked_frac": inputs.keep == 0}
    for kind, mask in _by_kind(inputs.live, inputs).items():
        means |= _means({f"mismatch/{name}{kind}": each for name, each in values.items()}, mask)
        maxima[f"mismatch/is_weight_max{kind}"] = _largest(inputs.weights, mask)
    return replace(sums, means=means, maxima=maxima)


def add_sample_sizes(metrics: Metrics) -> None:
    """Replace the sums of squared weights by mismatch/ess, the effective sample size over all micro-batches."""
    for name in [name for name in metrics.sums if name.startswith(f"mismatch/{SQUARES}")]:
        kind = name.removeprefix(f"mismatch/{SQUARES}")
        (squares, count), (total, _) = metrics.sums.pop(name), metrics.sums[f"mismatch/is_weight_mean{kind}"]
        if squares:
            metrics.add(f"mismatch/ess{kind}", total * total / (squares * count))


@torch.no_grad()
def _sums(
    terms: dict[str, Tensor],
    indicators: dict[str, Tensor],
    inputs: LossInputs,
    new: Tensor,
    trainer: Tensor,
    entropy: Tensor | None,
    distance: Tensor | None,
) -> LossSums:
    live, means = inputs.live, dict[str, tuple[Tensor, Tensor]]()
    gap = log_ratio(new, inputs.old)
    ratio = gap.exp()
    values = {"policy/ratio_mean": ratio, "policy/kl_old": gap.expm1() - gap, "policy/kl_old_k1": -gap}
    values |= {f"policy/{name.replace('clip_', 'clip_frac_')}": flags for name, flags in indicators.items()}
    maxima = {"policy/ratio_max": _largest(ratio, live)}
    if entropy is not None:
        values["policy/entropy"] = entropy
    if inputs.ref is not None:
        values["policy/kl_ref"] = KINDS["k3"].function(new, inputs.ref)
        values["policy/kl_ref_k1"] = KINDS["k1"].function(new, inputs.ref)
    if distance is not None:
        sequences = _sum_of_means(live.to(new.dtype), inputs).round()
        means["policy/kl_controlled"] = _sum_of_means(distance.detach(), inputs), sequences
    if inputs.rollout is not None:
        scored = live & inputs.rollout.isfinite()
        values["mismatch/unscored_frac"] = ~scored
        scored = scored if inputs.ages is None else scored & (inputs.ages == 0)
        gaps = (trainer - inputs.rollout).abs()
        mismatch = (trainer - inputs.rollout).clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT)
        found = {"logp_gap_mean": gaps, "mult_prob_error": mismatch.abs().exp(), "kl": mismatch.expm1() - mismatch}
        for kind, mask in _by_kind(scored, inputs).items():
            means |= _means({f"mismatch/{name}{kind}": each for name, each in found.items()}, mask)
            maxima[f"mismatch/logp_gap_max{kind}"] = _largest(gaps, mask)
    return LossSums(
        tokens=live.sum(),
        terms={name: value.detach() for name, value in terms.items()},
        means=_means(values, live) | means,
        maxima=maxima,
    )


def _by_kind(mask: Tensor, inputs: LossInputs) -> dict[str, Tensor]:
    """The mask [T], and its parts with and without an image, keyed by the suffix of metric names."""
    if inputs.images is None:
        return {"": mask}
    return {"": mask, "/image": mask & inputs.images, "/text": mask & ~inputs.images}


def _means(values: Mapping[str, Tensor], mask: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    count = mask.sum()
    return {name: (each.to(torch.float64).where(mask, 0.0).sum(), count) for name, each in values.items()}


def _sum_of_means(values: Tensor, inputs: LossInputs) -> Tensor:
    """Sum over live sequences of the mean over their live tokens."""
    inside = values.where(inputs.live, 0.0)
    lengths = inputs.sequence_sum(inputs.live.to(inside.dtype)).clamp(min=1)
    return (inputs.sequence_sum(inside) / lengths).sum()


def _largest(values: Tensor, mask: Tensor) -> Tensor:
    """The maximum where the mask is set; -inf if it is nowhere."""
    inside = values.where(mask, -torch.inf)
    return inside.max() if len(inside) else inside.new_full((), -torch.inf)


# -- critic and demonstrations ---------------------------------------------------------------------


def value_objective(
    new: Tensor, old: Tensor, returns: Tensor, scales: Tensor, *, clip: float
) -> tuple[Tensor, LossSums]:
    live = scales > 0
    new, old, returns = (column.where(live, 0.0) for column in (new, old, returns))
    losses, clipped = value_loss(new, old, returns, clip=clip)
    loss, tokens = (losses * scales).sum(), live.sum()
    means = {"critic/clip_frac": (clipped.sum(), tokens), "critic/value_mean": (new.detach().sum(), tokens)}
    return loss, LossSums(tokens=tokens, terms={"critic/loss": loss.detach()}, means=means)


def value_loss(new: Tensor, old: Tensor, returns: Tensor, *, clip: float) -> tuple[Tensor, Tensor]:
    """Returns the loss [T] and where the clip blocks the gradient [T] bool; clip 0: the plain square."""
    error = (new - returns).square()
    if clip == 0:
        return error / 2, torch.zeros_like(error, dtype=torch.bool)
    moved = new - old
    # Inside the bounds use new, not old + moved, whose rounding would count as a clip.
    bounded = new.where(moved.abs() <= clip, old + moved.clamp(-clip, clip))
    held = (bounded - returns).square()
    return torch.maximum(error, held) / 2, held > error


def explained_variance(values: Tensor, returns: Tensor, live: Tensor) -> float | None:
    """1 - Var(Ret - V) / Var(Ret) over live tokens; None where returns do not vary."""
    values, returns = values[live].double(), returns[live].double()
    if len(returns) == 0 or bool((returns == returns[0]).all()):
        return None
    return 1 - ((returns - values).var() / returns.var()).item()


def imitation_objective(
    losses: Tensor, reported: Mapping[str, Tensor], scales: Tensor, *, term: str | None = None
) -> tuple[Tensor, LossSums]:
    """`reported`: values [T] whose means become metrics; `term`: name of the metric of the loss itself."""
    loss = (losses * scales).sum()
    tokens = torch.tensor(len(losses), device=losses.device)
    means = {name: (values.detach().double().sum(), tokens) for name, values in reported.items()}
    return loss, LossSums(tokens=tokens, terms={} if term is None else {term: loss.detach()}, means=means)
