"""An algorithm applied to records: which members train, how a step splits into updates, advantages
into the forests.

The pure functions know flat tensors only; here groups and batches are flattened for them and the
results written back.

    groups = choose_members(groups, algorithm, metrics)
    updates = write_advantages(updates, groups, algorithm, metrics)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from saccade.algorithms.advantages import AdvantageInputs, compute
from saccade.algorithms.aggregation import token_scales
from saccade.algorithms.algorithm import Algorithm
from saccade.algorithms.filters import discard_reason, in_baseline, is_constant, is_excluded
from saccade.algorithms.table import find
from saccade.errors import ConfigError
from saccade.types import Batch, Group, Metrics, Trajectory

Updates = list[list[Batch]]  # one list of forests per optimizer step


def keep_informative(
    groups: Sequence[Group], algorithm: Algorithm
) -> tuple[list[Group], Counter[str]]:
    """Dynamic sampling: the groups worth training on by their raw outcome, and why the others were
    dropped.
    """
    kept, reasons = [], Counter[str]()
    for group in groups:
        outcomes = [
            t.outcome
            for t in group.trajectories
            if t.outcome is not None and not is_excluded(t.status, algorithm.exclude_status)
        ]
        reason = discard_reason(outcomes, algorithm.filter.low, algorithm.filter.high)
        if reason is None:
            kept.append(group)
        else:
            reasons[reason] += 1
    return kept, reasons


def keep_chosen(groups: Sequence[Group], algorithm: Algorithm) -> tuple[list[Group], Counter[str]]:
    """What the user's own filter keeps, in the order of the groups."""
    assert algorithm.filter.function is not None
    function = find("filter.function", {}, algorithm.filter.function).function
    wanted = {group.uid for group in function(list(groups))}
    unknown = wanted - {group.uid for group in groups}
    if unknown:
        raise ConfigError(
            f"algorithm.filter.function={algorithm.filter.function} returned groups that it was "
            f"not given ({sorted(unknown)[:3]}); return some of its argument"
        )
    kept = [group for group in groups if group.uid in wanted]
    return kept, Counter({"own": len(groups) - len(kept)})


def choose_members(groups: Sequence[Group], algorithm: Algorithm, metrics: Metrics) -> list[Group]:
    """Mark who trains. With drop_constant a group without a signal is not computed at all."""
    chosen, low, high = [], 0, 0
    for group in groups:
        live = [
            t.trained and not is_excluded(t.status, algorithm.exclude_status)
            for t in group.trajectories
        ]
        rewards = [_reward(t) for t, alive in zip(group.trajectories, live, strict=True) if alive]
        if algorithm.estimator.group and len(rewards) > 1 and is_constant(rewards):
            low, high = low + (rewards[0] < 0.5), high + (rewards[0] >= 0.5)
            live = [alive and not algorithm.drop_constant for alive in live]
        if live != [t.trained for t in group.trajectories]:
            members = (replace(t, trained=a) for t, a in zip(group.trajectories, live, strict=True))
            group = replace(group, trajectories=tuple(members))
        chosen.append(group)
    metrics.add("group/constant_low", low)
    metrics.add("group/constant_high", high)
    return chosen


def _reward(trajectory: Trajectory) -> float:
    assert trajectory.reward is not None, f"{trajectory.key}: no reward, but not excluded either"
    return trajectory.reward


def split_updates(groups: Sequence[Group], updates: int, *, seed: int) -> list[list[Group]]:
    """Whole groups, in a seeded order, over the optimizer steps; groups without a member that
    trains are left out.
    """
    useful = [g for g in groups if any(t.trained and t.response_length for t in g.trajectories)]
    order = (
        np.random.default_rng(seed).permutation(len(useful))
        if updates > 1
        else np.arange(len(useful))
    )
    parts = np.array_split(order, min(updates, max(1, len(useful))))
    return [[useful[i] for i in sorted(part)] for part in parts if len(part)]


def write_advantages(
    updates: Updates, groups: Sequence[Group], algorithm: Algorithm, metrics: Metrics
) -> Updates:
    """Advantages over the whole step, scales over each optimizer step."""
    if not updates:  # every group was dropped or is constant: there is nothing to weigh
        return updates
    members = [(g, t) for g, group in enumerate(groups) for t in group.trajectories]
    place = {(groups[g].uid, t.repeat): i for i, (g, t) in enumerate(members)}
    owner = [
        [np.array([place[key] for key in batch.keys])[batch.sequence] for batch in batches]
        for batches in updates
    ]
    flat = [batch for batches in updates for batch in batches]
    sequence = torch.from_numpy(np.concatenate([o for owners in owner for o in owners]))
    live = torch.tensor([t.trained and t.response_length > 0 for _, t in members])
    baseline = torch.tensor(
        [
            t.reward is not None
            and in_baseline(t.status, algorithm.exclude_status, algorithm.excluded_in_baseline)
            for _, t in members
        ]
    )
    result = compute(
        algorithm.estimator,
        AdvantageInputs(
            rewards=torch.tensor(
                [float("nan") if t.reward is None else t.reward for _, t in members],
                dtype=torch.float64,
            ),
            groups=torch.tensor([g for g, _ in members]),
            live=live,
            baseline=baseline,
            lengths=torch.tensor([t.response_length for _, t in members]),
            sequence=sequence,
            token_penalties=_penalties(flat, algorithm),
            options=algorithm.advantage_options,
        ),
        adv_clip=algorithm.adv_clip,
    )
    metrics.add("group/singleton", result.singleton)
    metrics.add("adv/clip_frac", result.clip_frac)
    _advantage_metrics(result.values[result.live[sequence]], metrics)
    values = result.values.float().numpy()
    written: Updates = []
    start = 0
    group_of = torch.tensor([g for g, _ in members])
    for batches, owners in zip(updates, owner, strict=True):
        mine = torch.from_numpy(np.concatenate(owners))
        present = torch.zeros(len(members), dtype=torch.bool)
        present[mine] = True
        scales = token_scales(
            algorithm.aggregate.function,
            mine,
            live=result.live & present,
            group=group_of,
            fixed_length=algorithm.fixed_length,
        )
        metrics.add("policy/live_tokens", scales.tokens)
        metrics.add("policy/live_sequences", scales.sequences)
        ends = np.cumsum([len(batch.reads) for batch in batches])
        rows = []
        for batch, end in zip(batches, ends, strict=True):
            part = slice(end - len(batch.reads), end)
            rows.append(
                replace(
                    batch,
                    advantages=values[start + part.start : start + part.stop],
                    scales=scales.values[part].float().numpy(),
                )
            )
        start += int(ends[-1])
        written.append(rows)
    return written


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
        replace(
            g, trajectories=tuple(replace(t, advantages=values.get(t.key)) for t in g.trajectories)
        )
        for g in groups
    ]


def _penalties(batches: Sequence[Batch], algorithm: Algorithm) -> torch.Tensor:
    """β·KL per token where the KL is in the reward, else zeros."""
    if algorithm.kl.coef == 0 or algorithm.kl.place != "reward":
        return torch.zeros(sum(len(b.reads) for b in batches), dtype=torch.float64)
    old = torch.from_numpy(np.concatenate([b.old_logprobs for b in batches])).double()
    ref = torch.from_numpy(np.concatenate([b.ref_logprobs for b in batches])).double()
    return algorithm.kl.coef * algorithm.divergence.function(old, ref, algorithm.kl.clamp)


def _advantage_metrics(values: torch.Tensor, metrics: Metrics) -> None:
    if len(values):
        metrics.add("adv/mean", float(values.mean()))
        metrics.add("adv/std", float(values.std()) if len(values) > 1 else 0.0)
        metrics.add_max("adv/max", float(values.max()))
        metrics.add("adv/min", float(values.min()))


def with_logprobs(
    updates: Updates, column: str, scored: Sequence[tuple[np.ndarray, np.ndarray]]
) -> Updates:
    """`old_logprobs` or `ref_logprobs` into the forests, in their order."""
    rows = iter(scored)
    return [
        [replace(batch, **{column: next(rows)[0]}) for batch in batches]  # type: ignore[arg-type]
        for batches in updates
    ]


def write_supervision(batches: Sequence[Batch]) -> list[Batch]:
    """Supervised training is the policy gradient of an advantage of 1: every trained token counts
    the same.
    """
    tokens = sum(len(batch.reads) for batch in batches)
    return [
        replace(
            batch,
            advantages=np.ones(len(batch.reads), np.float32),
            scales=np.full(len(batch.reads), 1 / tokens, np.float32),
        )
        for batch in batches
    ]
