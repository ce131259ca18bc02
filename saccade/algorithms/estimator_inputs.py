"""What an estimator of advantages is given: the groups and forests of a step as flat tensors.

Legend: T tokens that count, S members of all groups, K terms of the reward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from saccade.algorithms.advantages import AdvantageInputs
from saccade.algorithms.algorithm_state import AlgorithmState, domain_of, success_of
from saccade.algorithms.filters import is_excluded
from saccade.algorithms.policy_losses import KINDS
from saccade.algorithms.resolved_algorithm import Algorithm
from saccade.algorithms.table import bound
from saccade.types import Batch, Group, Trajectory

ComponentWeights = Callable[[str], Mapping[str, float]]  # data source → weight of each term


def estimator_inputs(
    groups: Sequence[Group],
    batches: Sequence[Batch],
    sequence: Tensor,
    counted: Tensor,
    algorithm: Algorithm,
    state: AlgorithmState,
    component_weights: ComponentWeights | None,
) -> AdvantageInputs:
    members = [t for group in groups for t in group.trajectories]
    owners = [group for group in groups for _ in group.trajectories]
    sequence = sequence[counted]
    outside = () if algorithm.excluded_in_baseline else algorithm.exclude_status
    inputs = AdvantageInputs(
        rewards=_numbers(_reward(t) for t in members),
        groups=torch.tensor([g for g, group in enumerate(groups) for _ in group.trajectories]),
        live=torch.tensor([t.trained and t.response_length > 0 for t in members]),
        baseline=torch.tensor([t.reward is not None and not is_excluded(t.status, outside) for t in members]),
        lengths=torch.tensor([t.response_length for t in members]) - int(not counted.all()),
        sequence=sequence,
        token_penalties=_penalties(batches, algorithm)[counted],
    )
    entry = algorithm.estimator
    if entry.critic:
        inputs = replace(inputs, values=_numbers_of(batches, "values")[counted])
        inputs = replace(inputs, final_values=_final_values(members, batches, algorithm))
    if entry.greedy:
        inputs = replace(inputs, greedy=_numbers(_reward(group.greedy) for group in owners))
    if entry.weigh:
        found = [(domain_of(group), success_of(group, algorithm)) for group in groups]
        weights = [1.0 if y is None else entry.weigh(state.domains, domain, y) for domain, y in found]
        inputs = replace(inputs, domain_weights=_numbers(weights)[inputs.groups])
    if entry.components:
        assert component_weights is not None, "the terms of the reward have weights"
        values, weights_ = _components(owners, members, component_weights)
        inputs = replace(inputs, components=values, component_weights=weights_)
    if algorithm.advantage_options.get("drpo_kl_damp"):
        old, ref = _numbers_of(batches, "old_logprobs"), _numbers_of(batches, "ref_logprobs")
        gap = KINDS["k3"].function(old, ref)[counted]
        drift = inputs.sum_by(sequence, gap, len(members))
        inputs = replace(inputs, drift=drift)
    return inputs


def _reward(trajectory: Trajectory | None) -> float:
    if trajectory is None or trajectory.reward is None or is_excluded(trajectory.status):
        return float("nan")
    return trajectory.reward


def _components(
    owners: Sequence[Group], members: Sequence[Trajectory], weights_of: ComponentWeights
) -> tuple[Tensor, Tensor]:
    """Terms of the reward and their weights, [S, K] each; a term that a source lacks weighs 0."""
    by_source = {s: weights_of(s) for s in sorted({g.sample.data_source for g in owners})}
    names = sorted({name for weights in by_source.values() for name in weights})
    # What an environment gave on the way is a term of its own.
    values = [[sum(t.turn_rewards), *(t.parts.get(name, 0.0) for name in names)] for t in members]
    weights = [[1.0, *(by_source[g.sample.data_source].get(name, 0.0) for name in names)] for g in owners]
    return _numbers(values), _numbers(weights)


def _final_values(members: Sequence[Trajectory], batches: Sequence[Batch], algorithm: Algorithm) -> Tensor | None:
    """The critic's view after a truncated response; an episode that ended is worth nothing more."""
    if not algorithm.critic.bootstrap_truncated:
        return None
    last = {
        key: float(value)
        for batch in batches
        for key, value in zip(batch.keys, batch.last_values, strict=True)  # type: ignore[arg-type]
    }
    return _numbers(last.get(t.key, 0.0) if t.status == "truncated" else 0.0 for t in members)


def _penalties(batches: Sequence[Batch], algorithm: Algorithm) -> Tensor:
    """β·KL per token where the KL is in the reward, else zeros."""
    if not algorithm.kl_in_reward:
        return torch.zeros(sum(len(b.reads) for b in batches), dtype=torch.float64)
    old, ref = _numbers_of(batches, "old_logprobs"), _numbers_of(batches, "ref_logprobs")
    distance = bound(algorithm.divergence.function, algorithm.kl_options)(old, ref)
    return algorithm.kl.coef * distance


def column(batches: Sequence[Batch], name: str) -> Tensor:
    return torch.from_numpy(np.concatenate([getattr(b, name) for b in batches])).double()


def _numbers_of(batches: Sequence[Batch], name: str) -> Tensor:
    """A column that estimators count with; `annotate.py` looks whether it was one of numbers."""
    return column(batches, name).nan_to_num(posinf=0.0, neginf=0.0)


def _numbers(values: Iterable[float | list[float]]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.float64)
