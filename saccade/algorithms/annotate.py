"""Compute the per-token columns needed before training, and write them into the forests of a step.

    updates, metrics_later = add_advantages(updates, groups, algorithm, state)
    updates, more_later = add_corrections(updates, algorithm)
    batches = write_selection(batches, algorithm, seed=…)      # once per optimizer step

The pure functions take flat tensors; this module flattens groups and forests for them and writes the
results back. Statistics run over whole groups of the whole step, scales over one optimizer step, so no
split into micro-batches changes a result. Metrics are computed later, while the models train.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from saccade.algorithms import corrections
from saccade.algorithms.advantages import AdvantageInputs, Advantages, compute
from saccade.algorithms.aggregation import AGGREGATIONS, masked_select, sequence_scales, token_scales
from saccade.algorithms.algorithm_state import AlgorithmState
from saccade.algorithms.filters import high_entropy, is_excluded
from saccade.algorithms.objective import explained_variance
from saccade.algorithms.policy_losses import KINDS, SelectionInputs
from saccade.algorithms.resolved_algorithm import Algorithm
from saccade.algorithms.select import Updates
from saccade.algorithms.table import Entry
from saccade.forest.batch import Batch
from saccade.types import Group, Metrics, Trajectory

ComponentWeights = Callable[[str], Mapping[str, float]]  # data source → weight of each term
DeferredMetrics: TypeAlias = Callable[[], Metrics]  # computes the metrics of a stage; called later

RECORD_NAMES = {"advantages": "advantages", "old_logprobs": "trainer_logp", "old_entropies": "entropy"}  # of columns

# -- advantages and scales -------------------------------------------------------------------------


def add_advantages(
    updates: Updates,
    groups: Sequence[Group],
    algorithm: Algorithm,
    state: AlgorithmState,
    component_weights: ComponentWeights | None = None,
    *,
    version: int = 0,
) -> tuple[Updates, DeferredMetrics]:
    """Returns the forests with advantages over the whole step and scales over each optimizer step.
    `version`: of the weights before the update.
    """
    if not updates:  # every group was dropped or is constant: nothing has an advantage
        return updates, Metrics
    members = [t for group in groups for t in group.trajectories]
    index_of = {t.key: index for index, t in enumerate(members)}
    flat = [batch for batches in updates for batch in batches]
    owners = np.array([index_of[key] for batch in flat for key in batch.keys])
    lengths = np.concatenate([batch.lengths for batch in flat])
    hot, first = algorithm.hot_first_token, None  # [T] bool: first token of each sequence, if it is masked
    if hot.temperature > 0 and hot.first_token == "mask":
        first = _is_first(_sequences(flat))
    # If all tokens of a sequence have the same advantage, compute it once.
    by_token = first is not None or algorithm.estimator.whiten or algorithm.adv_clip > 0 or algorithm.kl_in_reward
    per_member = algorithm.estimator.by_member and not by_token
    sequence = torch.from_numpy(owners if per_member else np.repeat(owners, lengths))
    counted = torch.ones_like(sequence, dtype=torch.bool) if first is None else ~first
    inputs = _estimator_inputs(groups, flat, sequence, counted, algorithm, state, component_weights)
    result = compute(algorithm.estimator, inputs, adv_clip=algorithm.adv_clip, drop_constant=algorithm.drop_constant)
    values = {"advantages": result.values, "returns": result.returns}
    if not _all_finite(flat):
        # Some model output is not finite: with NaN advantages the guard skips every update.
        values = dict.fromkeys(values, torch.full_like(result.values, torch.nan))
    columns = {"rewards": inputs.rewards.nan_to_num()[owners]}
    for name, found in values.items():
        if found is not None:  # 0 at tokens that do not count
            whole = len(found) == len(counted)
            columns[name] = found if whole else found.new_zeros(len(counted)).masked_scatter(counted, found)
    # Older weights sampled some tokens: for these, a gap between engine and trainer is expected.
    packed = [members[index] for index in owners.tolist()]
    sampled = np.concatenate([t.versions[a:b] for t in packed for a, b in t.runs])
    if (sampled < version).any():
        columns["ages"] = torch.from_numpy(version - sampled)
    live, scales = list[Tensor](), list[Tensor]()  # per update: trained tokens of each member; scale of each sequence
    parts = [sum(len(batch.keys) for batch in batches) for batches in updates]
    for mine, counts in zip(*(torch.from_numpy(whole).split(parts) for whole in (owners, lengths)), strict=True):
        everyone = torch.zeros(len(members), dtype=torch.int64)
        live.append(everyone.index_add(0, mine, counts - int(first is not None)) * result.live)
        scales.append(sequence_scales(algorithm.aggregate, live[-1], inputs.groups)[mine])
    columns["scales"] = torch.cat(scales)
    if first is not None:
        columns["scales"] = torch.from_numpy(np.repeat(columns["scales"].numpy(), lengths)).where(~first, 0.0)

    def compute_metrics() -> Metrics:
        metrics = Metrics()
        for name, number in result.counts.items():
            if not (algorithm.drops_early and name.startswith("constant")):  # mark_members has counted those
                metrics.add(f"group/{name}", number)
        _advantage_metrics(result, inputs, metrics, np.repeat(np.arange(len(owners)), lengths) if per_member else ...)
        for counts in live:
            metrics.add("policy/live_tokens", int(counts.sum()))
            metrics.add("policy/live_sequences", int((counts > 0).sum()))
        return metrics

    return _with_columns(updates, columns), compute_metrics


def _estimator_inputs(
    groups: Sequence[Group],
    batches: Sequence[Batch],
    sequence: Tensor,
    counted: Tensor,
    algorithm: Algorithm,
    state: AlgorithmState,
    component_weights: ComponentWeights | None,
) -> AdvantageInputs:
    """The groups and forests of a step as flat tensors, with the optional inputs that the estimator reads."""
    owners = [group for group in groups for _ in group.trajectories]
    members = [t for group in groups for t in group.trajectories]
    group_index = torch.tensor([index for index, group in enumerate(groups) for _ in group.trajectories])
    whole, sequence, estimator = sequence, masked_select(sequence, counted), algorithm.estimator
    outside = () if algorithm.excluded_in_baseline else algorithm.exclude_status
    penalties, read = torch.zeros((), dtype=torch.float64).expand(len(sequence)), dict[str, Any]()

    def distance(kind: Entry) -> Tensor:
        return kind(_finite_column(batches, "old_logprobs"), _finite_column(batches, "ref_logprobs"))[counted]

    if algorithm.kl_in_reward:
        penalties = algorithm.kl.coef * distance(algorithm.divergence)
    if estimator.critic:
        read["values"] = _finite_column(batches, "values")[counted]
        if algorithm.critic.bootstrap_truncated:  # after the end of any other episode the value is 0
            last = {key: float(value) for b in batches for key, value in zip(b.keys, b.last_values, strict=True)}  # type: ignore[arg-type]
            read["final_values"] = _floats(last.get(t.key, 0.0) if t.status == "truncated" else 0.0 for t in members)
    if estimator.greedy:
        read["greedy"] = _floats(_reward(group.greedy) for group in owners)
    if estimator.weigh:
        weigh = estimator.bound("weigh")
        weights = [weigh(state.domains, group, algorithm) for group in groups]
        read["domain_weights"] = _floats(weights)[group_index]
    if estimator.components:
        assert component_weights is not None, "the terms of the reward have weights"
        read["components"], read["component_weights"] = _components(owners, members, component_weights)
    if estimator.turns:
        read["turns"], read["earned"] = _turns(members, whole, counted)
    if estimator.options.get("drpo_kl_damp"):
        read["drift"] = AdvantageInputs.sum_by(sequence, distance(KINDS["k3"]), len(members))
    return AdvantageInputs(
        rewards=_floats(_reward(t) for t in members),
        groups=group_index,
        live=torch.tensor([t.trained and t.response_length > 0 for t in members]),
        baseline=torch.tensor([t.reward is not None and not is_excluded(t.status, outside) for t in members]),
        lengths=torch.tensor([t.response_length for t in members]) - int(len(sequence) < len(counted)),
        sequence=sequence,
        token_penalties=penalties,
        **read,
    )


def _reward(trajectory: Trajectory | None) -> float:
    if trajectory is None or trajectory.reward is None or is_excluded(trajectory.status):
        return float("nan")
    return trajectory.reward


def _components(
    owners: Sequence[Group], members: Sequence[Trajectory], weights_of: ComponentWeights
) -> tuple[Tensor, Tensor]:
    """Terms of the reward and their weights, [S, K] each; the weight is 0 if a data source lacks the term."""
    by_source = {s: weights_of(s) for s in sorted({g.sample.data_source for g in owners})}
    names = sorted({name for weights in by_source.values() for name in weights})
    # The sum of the environment's turn rewards is a term of its own.
    values = [[sum(t.turn_rewards), *(t.parts.get(name, 0.0) for name in names)] for t in members]
    weights = [[1.0, *(by_source[g.sample.data_source].get(name, 0.0) for name in names)] for g in owners]
    return _floats(values), _floats(weights)


def _turns(members: Sequence[Trajectory], sequence: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """[T] turn of each token that counts, and [S, turns] the environment's reward of each turn."""
    packed = [members[index].runs for index in torch.unique_consecutive(sequence).tolist()]
    turns = [np.repeat(np.arange(len(runs)), [end - start for start, end in runs]) for runs in packed]
    earned = torch.zeros(len(members), max(len(t.runs) for t in members), dtype=torch.float64)
    for row, member in zip(earned, members, strict=True):
        for turn, reward in enumerate(member.turn_rewards):
            row[min(turn, len(member.runs) - 1)] += reward
    return torch.from_numpy(np.concatenate(turns))[counted], earned


def _all_finite(batches: Sequence[Batch]) -> bool:
    """Whether all log-probs and values that the models computed for these tokens are finite."""
    names = ("old_logprobs", "ref_logprobs", "values")
    found = [getattr(batch, name) for batch in batches for name in names]
    return all(np.isfinite(values).all() for values in found if values is not None)


def _is_first(sequence: Tensor) -> Tensor:
    return sequence.diff(prepend=sequence.new_full((1,), -1)) != 0


def _advantage_metrics(result: Advantages, inputs: AdvantageInputs, metrics: Metrics, tokens: Any) -> None:
    """`tokens`: index into the results for each token."""
    metrics.add("adv/clip_frac", result.clip_frac)
    live, values = inputs.per_token(result.live)[tokens], result.values[tokens]
    if live.numpy().any():
        for name, whole in {"adv": values, "returns": result.returns}.items():
            if whole is not None:
                inside = masked_select(whole, live)
                metrics.add(f"{name}/mean", float(inside.mean()))
                metrics.add(f"{name}/std", float(inside.std()) if len(inside) > 1 else 0.0)
        low, high = masked_select(values, live).aminmax()
        metrics.add_max("adv/max", float(high))
        metrics.add("adv/min", float(low))
    if result.returns is not None and inputs.values is not None:
        explained = explained_variance(inputs.values, result.returns, live)
        if explained is not None:
            metrics.add("critic/explained_var", explained)


# -- corrections and filters of tokens -------------------------------------------------------------


def add_corrections(updates: Updates, algorithm: Algorithm) -> tuple[Updates, DeferredMetrics]:
    """Returns the forests with weights and masks that correct for the difference between engine and
    trainer, or that keep only some tokens.

    They never change advantages. Denominators are per optimizer step.
    """
    if updates and algorithm.in_loss:
        return updates, Metrics
    hot, top = algorithm.hot_first_token, algorithm.entropy_top
    weighted = hot.temperature > 0 and hot.first_token == "is"
    flat = [batch for batches in updates for batch in batches]
    metrics = Metrics()
    if not (updates and (algorithm.at_once or top or weighted)):
        metrics.add("mismatch/ess", 1.0)
        metrics.add("mismatch/masked_frac", 0.0)
        return updates, lambda: metrics
    cap = hot.cap if weighted else None
    ends = np.cumsum([batch.target_count for batch in flat]).tolist()
    written: dict[str, np.ndarray] = defaultdict(lambda: np.empty(ends[-1], np.float32))
    for batch, end in zip(flat, ends, strict=True):  # one batch at a time, so that it fits in the CPU's cache
        for name, values in _correction(batch, algorithm, cap).items():
            written[name][end - batch.target_count : end] = values.numpy()
    if top:
        entropies, live = column(flat, "old_entropies"), column(flat, "scales") > 0
        kept = high_entropy(entropies, live, _sequences(flat), fraction=top, scope=algorithm.entropy_scope)
        metrics.add("policy/entropy_kept_frac", float((kept & live).sum()), float(live.sum()))
        written["keep"] = written.get("keep", live.numpy()) * kept.numpy()

    def compute_metrics() -> Metrics:
        # Recompute in the background instead of keeping all columns in memory until now.
        _correction_metrics([_correction(batch, algorithm, cap) for batch in flat], flat, metrics)
        return metrics

    updates = _with_columns(updates, written)
    if algorithm.self_normalise:
        updates = [
            _with(b, weights=corrections.self_normalise(column(b, "weights"), column(b, "scales") > 0)) for b in updates
        ]
    if algorithm.denominator == "kept":
        updates = [_over_kept(batches, algorithm) for batches in updates]
    return updates, compute_metrics


def _correction(batch: Batch, algorithm: Algorithm, cap: float | None) -> dict[str, Tensor]:
    """New columns of a batch. `cap`: upper bound of the weights of first tokens sampled at a higher temperature."""
    live, sequence = torch.from_numpy(batch.per_target("scales") > 0), _sequences([batch])
    old, rollout = column([batch], "old_logprobs"), column([batch], "rollout_logprobs")
    found = {"weights": torch.ones((), dtype=torch.float64).expand(len(live))}
    if cap is not None:
        first = _is_first(sequence)
        ratio = (old - rollout).nan_to_num().clamp(-20, 20).exp().clamp(max=cap)
        rollout = old.where(first, rollout)  # its gap is intended and already corrected by `ratio`
        found = {"weights": ratio.where(first, found["weights"]), "rollout_logprobs": rollout}
    if algorithm.at_once:
        ages = None if batch.ages is None else column([batch], "ages")
        mismatch = corrections.measure(old, rollout, live=live, sequence=sequence, sequences=len(batch.keys), ages=ages)
        correction = corrections.apply(algorithm.at_once, mismatch)
        if correction.keep is not None:
            found["keep"] = live * correction.keep
        if correction.weights is not None:
            found["weights"] = correction.weights if cap is None else found["weights"] * correction.weights
    return found


def _correction_metrics(found: Sequence[Mapping[str, Tensor]], batches: Sequence[Batch], metrics: Metrics) -> None:
    live, weights = column(batches, "scales") > 0, torch.cat([one["weights"] for one in found])
    keep = torch.cat([one["keep"] for one in found]) if "keep" in found[0] else live
    images = _per_target(batches, np.concatenate([batch.has_media for batch in batches]))
    every = np.count_nonzero(live.numpy())
    for kind, mask in {"": live, "/image": live & images, "/text": live & ~images}.items():
        count = np.count_nonzero(mask.numpy())
        if not count:
            continue
        if not kind or count < every:  # else these are all tokens, with the numbers computed above
            inside, masked = masked_select(weights, mask), np.count_nonzero((mask & ~keep.bool()).numpy())
            mean, largest, size = float(inside.mean()), float(inside.max()), corrections.effective_sample_size(inside)
        metrics.add(f"mismatch/is_weight_mean{kind}", mean)
        metrics.add_max(f"mismatch/is_weight_max{kind}", largest)
        metrics.add(f"mismatch/masked_frac{kind}", float(masked), float(count))
        metrics.add(f"mismatch/ess{kind}", size)


def _over_kept(batches: Sequence[Batch], algorithm: Algorithm) -> list[Batch]:
    """Divide the policy term by the number of kept tokens. The factor is multiplied into `keep`, because
    the KL and the entropy retain the original denominator.
    """
    if batches[0].keep is None:
        return [*batches]
    scales, keep = column(batches, "scales"), column(batches, "keep")
    kept = (keep > 0) & (scales > 0)
    groups = torch.from_numpy(np.concatenate([batch.groups for batch in batches]))
    everybody = torch.ones_like(groups, dtype=torch.bool)
    over_kept, _ = token_scales(algorithm.aggregate, _sequences(batches), live=everybody, group=groups, counted=kept)
    factor = (over_kept / scales.where(kept, 1.0)).where(kept, 0.0)
    return _with(batches, keep=keep * factor)


# -- selection of tokens, once per optimizer step --------------------------------------------------


def write_selection(
    batches: Sequence[Batch], current: Sequence[np.ndarray] | None, algorithm: Algorithm, *, seed: str
) -> list[Batch]:
    """Mark tokens that the policy loss treats differently. `current`: log-probs now; None: the old ones."""
    live = column(batches, "scales") > 0
    noise = torch.from_numpy(np.concatenate([_token_noise(batch, seed) for batch in batches]))
    old = column(batches, "old_logprobs")
    new = old if current is None else torch.from_numpy(np.concatenate(current)).double()
    inputs = SelectionInputs(
        new=new[live], old=old[live], advantages=column(batches, "advantages")[live], noise=noise[live]
    )
    selected = torch.zeros(len(live), dtype=torch.float64)
    selected[live] = algorithm.loss.bound("select")(inputs).double()
    return _with(batches, selected=selected)


def _token_noise(batch: Batch, seed: str) -> np.ndarray:
    """[T] int64 noise that depends only on the seed, the rollout and the position of each token."""
    rows = []
    for (uid, repeat), length in zip(batch.keys, batch.lengths.tolist(), strict=True):
        digest = hashlib.blake2b(f"{seed}/{uid}/{repeat}".encode(), digest_size=8).digest()
        rng = np.random.Generator(np.random.PCG64(int.from_bytes(digest, "big")))
        rows.append(rng.integers(0, 1 << 62, length))
    return np.concatenate(rows)


# -- the critic's scales ---------------------------------------------------------------------------


def for_critic(batches: Sequence[Batch]) -> list[Batch]:
    """The same forests with the critic's own denominator: a mean over live tokens."""
    sequence = _sequences(batches)
    everybody, counted = sequence.bincount() > 0, column(batches, "scales") > 0
    return _with(batches, scales=token_scales(AGGREGATIONS["token_mean"], sequence, live=everybody, counted=counted)[0])


# -- flattening and writing back -------------------------------------------------------------------


def with_scores(updates: Updates, columns: Sequence[str], scored: Iterable[Sequence[np.ndarray]]) -> Updates:
    """Add what a trainer computed for each forest, in their order, as columns with these names."""
    rows = iter(scored)
    return [
        [replace(batch, **dict(zip(columns, next(rows), strict=False))) for batch in batches]  # type: ignore[arg-type]
        for batches in updates
    ]


def show_columns(groups: Sequence[Group], updates: Updates) -> list[Group]:
    """The groups with per-token columns copied back to their trained members, for records: `advantages`,
    and in `info` the trainer's log-probs and entropies.
    """
    known: dict[tuple[str, int], dict[str, np.ndarray]] = defaultdict(dict)
    for batch in (batch for batches in updates for batch in batches):
        for name in batch.columns.keys() & RECORD_NAMES.keys():
            parts = np.split(batch.per_target(name), batch.lengths.cumsum()[:-1])
            for key, part in zip(batch.keys, parts, strict=True):
                known[key][RECORD_NAMES[name]] = part

    def shown(t: Trajectory) -> Trajectory:
        info = {**t.info, **known[t.key]}
        return replace(t, advantages=info.pop("advantages", None), info=info)

    return [replace(group, trajectories=tuple(map(shown, group.trajectories))) for group in groups]


def column(batches: Sequence[Batch], name: str) -> Tensor:
    return torch.from_numpy(np.concatenate([b.per_target(name) for b in batches])).double()


def _finite_column(batches: Sequence[Batch], name: str) -> Tensor:
    """A column with 0 for NaN and infinity, for estimators; `_all_finite` checks for these separately."""
    return column(batches, name).nan_to_num(posinf=0.0, neginf=0.0)


def _floats(values: Iterable[float | list[float]]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.float64)


def _sequences(batches: Sequence[Batch]) -> Tensor:
    """[T] index of each token's sequence among those of all batches."""
    return _per_target(batches, np.arange(sum(len(batch.keys) for batch in batches)))


def _per_target(batches: Sequence[Batch], values: np.ndarray) -> Tensor:
    """[T] from one value per sequence of all batches."""
    return torch.from_numpy(np.repeat(values, np.concatenate([batch.lengths for batch in batches])))


def _with(batches: Sequence[Batch], **columns: Tensor) -> list[Batch]:
    return _with_columns([list(batches)], columns)[0]


def _with_columns(updates: Updates, columns: Mapping[str, Tensor | np.ndarray]) -> Updates:
    """Split columns over all targets, or over all sequences, of the updates, and add them to their forests."""
    flat = [batch for batches in updates for batch in batches]
    sizes = [batch.target_count for batch in flat], [len(batch.keys) for batch in flat]
    cuts = {sum(each): np.cumsum(each)[:-1] for each in sizes}
    rows: Any = {name: np.split(np.asarray(whole, np.float32), cuts[len(whole)]) for name, whole in columns.items()}
    written = iter([replace(b, **{name: parts[n] for name, parts in rows.items()}) for n, b in enumerate(flat)])
    return [[next(written) for _ in batches] for batches in updates]
