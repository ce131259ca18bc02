"""What is computed for every token before training on it, written into the forests of a step.

    updates, metrics = add_advantages(updates, groups, algorithm, state)
    updates, more = add_corrections(updates, algorithm)
    batches = write_selection(batches, algorithm, seed=…)      # once per optimizer step

The pure functions know flat tensors only; here groups and forests are flattened for them and the
results written back. Statistics run over whole groups of the whole step, scales over one optimizer
step, so no split into micro-batches changes a result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.algorithms import corrections
from saccade.algorithms.advantages import AdvantageInputs, Advantages, compute
from saccade.algorithms.aggregation import AGGREGATIONS, token_scales
from saccade.algorithms.algorithm_state import AlgorithmState
from saccade.algorithms.estimator_inputs import ComponentWeights, column, estimator_inputs
from saccade.algorithms.filters import high_entropy
from saccade.algorithms.objective import explained_variance
from saccade.algorithms.policy_losses import SelectionInputs
from saccade.algorithms.resolved_algorithm import Algorithm
from saccade.algorithms.select import Updates
from saccade.algorithms.table import bound
from saccade.forest.packing import has_media
from saccade.types import Batch, Group, Metrics, Trajectory

# -- advantages and scales -------------------------------------------------------------------------


def add_advantages(
    updates: Updates,
    groups: Sequence[Group],
    algorithm: Algorithm,
    state: AlgorithmState,
    component_weights: ComponentWeights | None = None,
    *,
    version: int = 0,
) -> tuple[Updates, Metrics]:
    """The forests with advantages over the whole step and scales over each optimizer step.
    `version` is that of the weights before the update.
    """
    metrics = Metrics()
    if not updates:  # every group was dropped or is constant: nothing has an advantage
        return updates, metrics
    members = [t for group in groups for t in group.trajectories]
    place = {t.key: index for index, t in enumerate(members)}
    flat = [batch for batches in updates for batch in batches]
    owner = [np.array([place[key] for key in batch.keys])[batch.sequence] for batch in flat]
    sequence = torch.from_numpy(np.concatenate(owner))
    counted = _counted(sequence, algorithm)
    inputs = estimator_inputs(groups, flat, sequence, counted, algorithm, state, component_weights)
    result = compute(
        algorithm.estimator,
        inputs,
        algorithm.advantage_options,
        whiten=algorithm.whiten,
        whiten_std=algorithm.whiten_std,
        adv_clip=algorithm.adv_clip,
        drop_constant=algorithm.drop_constant,
    )
    if not algorithm.drops_early:
        metrics.add("group/constant_low", result.constant_low)
        metrics.add("group/constant_high", result.constant_high)
    _advantage_metrics(result, inputs, metrics)
    if not _finite(flat):
        # A model that computes no numbers gets none back: the guard skips each of its updates.
        nothing = torch.full_like(result.values, torch.nan)
        result = replace(result, values=nothing, returns=nothing)
    columns = {"rewards": inputs.rewards.nan_to_num()[sequence]}
    for name, values in {"advantages": result.values, "returns": result.returns}.items():
        if values is not None:  # 0 at tokens that do not count
            columns[name] = values.new_zeros(len(counted)).masked_scatter(counted, values)
    if any(t.versions[t.policy_mask].min(initial=version) < version for t in members):
        columns["stale"] = _stale(members, sequence, version)
    updates = _written(updates, columns)
    reads = iter(sequence.split([len(batch.reads) for batch in flat]))
    scaled = [
        _scaled(batches, torch.cat([next(reads) for _ in batches]), result, inputs, algorithm, metrics)
        for batches in updates
    ]
    return scaled, metrics


def _finite(batches: Sequence[Batch]) -> bool:
    """Whether all that models have said of these tokens are numbers."""
    names = ("old_logprobs", "ref_logprobs", "values")
    found = [getattr(batch, name) for batch in batches for name in names]
    return all(np.isfinite(values).all() for values in found if values is not None)


def _counted(sequence: Tensor, algorithm: Algorithm) -> Tensor:
    """[T] bool: tokens that train; a hot first token need not."""
    hot = algorithm.hot_first_token
    masked = hot.temperature > 0 and hot.first_token == "mask"
    return ~_first(sequence) if masked else torch.ones_like(sequence, dtype=torch.bool)


def _stale(members: Sequence[Trajectory], sequence: Tensor, version: int) -> Tensor:
    """1 where other weights than those of `version` sampled the token: there a gap between engine
    and trainer is no error of either.
    """
    trained = (members[int(index)] for index in sequence[_first(sequence)])
    return torch.from_numpy(np.concatenate([t.versions[t.policy_mask] < version for t in trained])).double()


def _first(sequence: Tensor) -> Tensor:
    return sequence.diff(prepend=sequence.new_full((1,), -1)) != 0


def _scaled(
    batches: Sequence[Batch],
    sequence: Tensor,
    result: Advantages,
    inputs: AdvantageInputs,
    algorithm: Algorithm,
    metrics: Metrics,
) -> list[Batch]:
    """The denominators of one optimizer step."""
    present = torch.zeros_like(result.live)
    present[sequence] = True
    scales = token_scales(
        algorithm.aggregate.function,
        sequence,
        live=result.live & present,
        group=inputs.groups,
        counted=_counted(sequence, algorithm),
        options=algorithm.aggregation_options,
    )
    metrics.add("policy/live_tokens", scales.tokens)
    metrics.add("policy/live_sequences", scales.sequences)
    return _with(batches, scales=scales.values)


def _advantage_metrics(result: Advantages, inputs: AdvantageInputs, metrics: Metrics) -> None:
    metrics.add("group/singleton", result.singleton)
    metrics.add("group/no_baseline", result.no_baseline)
    metrics.add("adv/clip_frac", result.clip_frac)
    live = result.live[inputs.sequence]
    for name, column_ in {"adv": result.values, "returns": result.returns}.items():
        values = None if column_ is None else column_[live]
        if values is not None and len(values):
            metrics.add(f"{name}/mean", float(values.mean()))
            metrics.add(f"{name}/std", float(values.std()) if len(values) > 1 else 0.0)
            if name == "adv":
                metrics.add_max("adv/max", float(values.max()))
                metrics.add("adv/min", float(values.min()))
    if result.returns is not None and inputs.values is not None:
        explained = explained_variance(inputs.values, result.returns, live)
        if explained is not None:
            metrics.add("critic/explained_var", explained)


# -- corrections and filters of tokens -------------------------------------------------------------


def add_corrections(updates: Updates, algorithm: Algorithm) -> tuple[Updates, Metrics]:
    """The forests with weights and masks that correct what the engine sampled differently, or keep
    some tokens only.

    They never change advantages. Each optimizer step divides by what is its own.
    """
    metrics = Metrics()
    fire, top = algorithm.hot_first_token, algorithm.entropy_top
    hot = fire.temperature > 0 and fire.first_token == "is"
    flat = [batch for batches in updates for batch in batches]
    if not (updates and (algorithm.at_once or top or hot)):
        metrics.add("mismatch/ess", 1.0)
        metrics.add("mismatch/masked_frac", 0.0)
        return updates, metrics
    sequence = _sequences(flat)
    live = column(flat, "scales") > 0
    weights, keep = torch.ones(len(live), dtype=torch.float64), live.double()
    old, rollout = column(flat, "old_logprobs"), column(flat, "rollout_logprobs")
    if hot:
        first = _first(sequence)
        ratio = (old - rollout).nan_to_num().clamp(-20, 20).exp().clamp(max=fire.cap)
        weights = ratio.where(first, weights)
        rollout = old.where(first, rollout)  # its gap is by design, and accounted for
        updates = _written(updates, {"rollout_logprobs": rollout})
    if algorithm.at_once:
        mismatch = corrections.measure(old, rollout, live=live, sequence=sequence)
        chosen = [(c.entry, c.options) for c in algorithm.at_once]
        correction = corrections.apply(chosen, mismatch)
        keep = keep if correction.keep is None else keep * correction.keep
        weights = weights if correction.weights is None else weights * correction.weights
    _correction_metrics(weights, keep, live, flat, metrics)
    if top:
        entropies = column(flat, "old_entropies")
        kept = high_entropy(entropies, live, sequence, fraction=top, scope=algorithm.entropy_scope)
        metrics.add("policy/entropy_kept_frac", float((kept & live).sum()), float(live.sum()))
        keep = keep * kept
    updates = _written(updates, {"weights": weights, "keep": keep})
    if algorithm.self_normalise:
        updates = [
            _with(b, weights=corrections.self_normalise(column(b, "weights"), column(b, "scales") > 0)) for b in updates
        ]
    if algorithm.denominator == "kept":
        updates = [_over_kept(batches, algorithm) for batches in updates]
    return updates, metrics


def _correction_metrics(
    weights: Tensor, keep: Tensor, live: Tensor, batches: Sequence[Batch], metrics: Metrics
) -> None:
    images = torch.from_numpy(np.concatenate([has_media(b)[b.sequence] for b in batches]))
    for kind, mask in {"": live, "/image": live & images, "/text": live & ~images}.items():
        if mask.any():
            count = float(mask.sum())
            metrics.add(f"mismatch/is_weight_mean{kind}", float(weights[mask].mean()))
            metrics.add_max(f"mismatch/is_weight_max{kind}", float(weights[mask].max()))
            metrics.add(f"mismatch/masked_frac{kind}", float((mask & (keep == 0)).sum()), count)
            size = corrections.effective_sample_size(weights, mask)
            metrics.add(f"mismatch/ess{kind}", size)


def _over_kept(batches: Sequence[Batch], algorithm: Algorithm) -> list[Batch]:
    """Divide the policy term by what was kept: the factor is part of `keep`, because the KL and
    the entropy keep the original denominator.
    """
    scales, keep = column(batches, "scales"), column(batches, "keep")
    sequence = _sequences(batches)
    kept = (keep > 0) & (scales > 0)
    groups = torch.from_numpy(np.concatenate([batch.groups for batch in batches]))
    over_kept = token_scales(
        algorithm.aggregate.function,
        sequence,
        live=torch.ones(len(groups), dtype=torch.bool),
        group=groups,
        counted=kept,
        options=algorithm.aggregation_options,
    )
    factor = (over_kept.values / scales.where(kept, 1.0)).where(kept, 0.0)
    return _with(batches, keep=keep * factor)


# -- selection of tokens, once per optimizer step --------------------------------------------------


def write_selection(
    batches: Sequence[Batch], current: Sequence[np.ndarray], algorithm: Algorithm, *, seed: str
) -> list[Batch]:
    """The tokens that the policy loss treats apart, from the log-probs of this moment."""
    assert algorithm.loss.select is not None
    live = column(batches, "scales") > 0
    noise = torch.from_numpy(np.concatenate([_token_noise(batch, seed) for batch in batches]))
    inputs = SelectionInputs(
        new=torch.from_numpy(np.concatenate(current)).double()[live],
        old=column(batches, "old_logprobs")[live],
        advantages=column(batches, "advantages")[live],
        noise=noise[live],
    )
    chosen = bound(algorithm.loss.select, algorithm.loss_options)(inputs)
    selected = torch.zeros(len(live), dtype=torch.float64)
    selected[live] = chosen.double()
    return _with(batches, selected=selected)


def old_logprobs(batches: Sequence[Batch]) -> list[np.ndarray]:
    found = [batch.old_logprobs for batch in batches if batch.old_logprobs is not None]
    assert len(found) == len(batches), "old log-probs were not computed"
    return found


def _token_noise(batch: Batch, seed: str) -> np.ndarray:
    """A number for each token that depends on its sample and its place alone."""
    rows = []
    for (uid, repeat), length in zip(batch.keys, batch.lengths.tolist(), strict=True):
        digest = hashlib.blake2b(f"{seed}/{uid}/{repeat}".encode(), digest_size=8).digest()
        rng = np.random.Generator(np.random.PCG64(int.from_bytes(digest, "big")))
        rows.append(rng.integers(0, 1 << 62, length))
    return np.concatenate(rows)


# -- the critic's view -----------------------------------------------------------------------------


def for_critic(batches: Sequence[Batch]) -> list[Batch]:
    """The same forests with the critic's own denominator: a mean over live tokens."""
    live = column(batches, "scales") > 0
    sequence = _sequences(batches)
    scales = token_scales(
        AGGREGATIONS["token_mean"].function,
        sequence,
        live=torch.ones(int(sequence.max()) + 1, dtype=torch.bool),
        counted=live,
    )
    return _with(batches, scales=scales.values)


# -- flat and back ---------------------------------------------------------------------------------


def with_scores(updates: Updates, columns: Sequence[str], scored: Iterable[Sequence[np.ndarray]]) -> Updates:
    """What a backend computed for each forest, in their order, under these names."""
    rows = iter(scored)
    return [
        [replace(batch, **dict(zip(columns, next(rows), strict=False))) for batch in batches]  # type: ignore[arg-type]
        for batches in updates
    ]


def show_advantages(groups: Sequence[Group], updates: Updates) -> list[Group]:
    """The groups with what their forests were given, for the record; None where nothing trained."""
    values = {
        key: batch.advantages[batch.sequence == index]
        for batches in updates
        for batch in batches
        if batch.advantages is not None
        for index, key in enumerate(batch.keys)
    }
    return [
        replace(g, trajectories=tuple(replace(t, advantages=values.get(t.key)) for t in g.trajectories)) for g in groups
    ]


def _sequences(batches: Sequence[Batch]) -> Tensor:
    """[T] a number for each sequence of all batches."""
    starts = np.cumsum([0, *(len(batch.keys) for batch in batches)])
    parts = [batch.sequence + start for batch, start in zip(batches, starts, strict=False)]
    return torch.from_numpy(np.concatenate(parts))


def _with(batches: Sequence[Batch], **columns: Tensor) -> list[Batch]:
    return _written([list(batches)], columns)[0]


def _written(updates: Updates, columns: Mapping[str, Tensor]) -> Updates:
    """Columns over all reads of the updates, cut into their forests."""
    flat = [batch for batches in updates for batch in batches]
    ends = np.cumsum([len(batch.reads) for batch in flat])[:-1]
    parts: list[dict[str, Any]] = [{} for _ in flat]
    for name, whole in columns.items():
        for part, values in zip(parts, np.split(whole.float().numpy(), ends), strict=True):
            part[name] = values
    changed = iter([replace(b, **part) for b, part in zip(flat, parts, strict=True)])
    return [[next(changed) for _ in batches] for batches in updates]
