"""Handles updates that were skipped, a mismatch between engine and trainer, and too many answers without a score."""

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from saccade.algorithms.resolved_algorithm import Algorithm
from saccade.config import EnvConfig, RewardConfig, TrainConfig
from saccade.errors import RewardError, TrainingError
from saccade.forest.batch import Batch
from saccade.rewards.verifiers import DEADLINE_OPTION
from saccade.rollout.scoring import GIVEN_UP
from saccade.trainer import Update
from saccade.types import Group, Metrics

log = logging.getLogger(__name__)

LARGEST_MISMATCH = 1.05  # mean of exp|old - rollout|; above it, the engine samples from another policy
MOST_UNSCORED = 0.01  # share of tokens that an engine may leave without a log-prob


def guard(
    update: Update,
    batches: Sequence[Batch],
    before: Mapping[str, int],
    train: TrainConfig,
    folder: Path,
    *,
    step: int,
    who: str = "policy",
) -> dict[str, int]:
    """Count the updates in a row that were skipped, of policy and critic; `before` is the count before this one. The
    batch of a skipped update is written into the folder of the run; several in a row end the run.
    """
    if not update.skipped:
        return {**before, who: 0}
    bad = before.get(who, 0) + 1
    whose = "" if who == "policy" else f"{who} "
    name = f"{whose}step-{step}-{bad}.npz".replace(" ", "-")
    where = save_batches(folder / "bad-batches" / name, batches)
    log.info(f"step {step}: {whose}loss or gradient not finite, update skipped; batch in {where}")
    if train.on_nonfinite == "stop" or bad >= train.max_bad_updates:
        raise TrainingError(f"{bad} {whose}updates in a row were not finite; lower train.lr, and look at {where}")
    return {**before, who: bad}


def save_batches(path: Path, batches: Sequence[Batch]) -> Path:
    """Save ids, log-probs, advantages and image hashes of a skipped update."""
    path.parent.mkdir(exist_ok=True)
    arrays: dict[str, Any] = {}
    for index, batch in enumerate(batches):
        columns = {"ids": batch.ids, "reads": batch.predictors, "targets": batch.targets, "sequence": batch.sequence}
        arrays |= {f"{index}/{name}": value for name, value in (columns | batch.columns).items()}
        arrays[f"{index}/keys"] = np.array([f"{id}/{repeat}" for id, repeat in batch.keys])
        arrays[f"{index}/media"] = np.array([span.media.hash for span in batch.media])
    np.savez(path, **arrays)
    return path


def check_mismatch(metrics: Metrics, algorithm: Algorithm, parity_max: float | None) -> None:
    """Raise if log-probs of engine and trainer differ too much in the first update of a step, before the policy has
    changed. A larger `rollout.parity_max` raises the limit.
    """
    found = metrics.means()
    error = found.get("mismatch/mult_prob_error", 1.0)
    limit = max(LARGEST_MISMATCH, math.exp(parity_max or 0.0))
    if error > limit and not algorithm.corrections:
        gap = f"mean exp|log-prob gap| is {error:.3f}, above {limit:.4g}"
        raise TrainingError(f"engine and trainer disagree: {gap}; try float32, or algorithm.correct=[tis.token]")
    unscored = found.get("mismatch/unscored_frac", 0.0)
    if unscored > MOST_UNSCORED:
        raise TrainingError(f"the engine gave {unscored:.1%} of its tokens no log-prob; use rollout.engine=embedded")


def check_errors(groups: Sequence[Group], reward: RewardConfig, env: EnvConfig) -> None:
    """Raise if more than `reward.max_error_rate` of the members have no score because something failed."""
    everybody = [t for group in groups for t in group.everyone]
    failed, most = [t for t in everybody if t.status == "error"], reward.max_error_rate
    if len(failed) <= most * len(everybody):
        return
    reasons = [t.reason or t.end_reason for t in failed]
    left = sum(t.reason == GIVEN_UP.result().reason for t in everybody)
    others = f" and {left} others were not waited for" if left else ""
    theirs = {t.end_reason in ("env_error", "timeout") for t in failed}
    blamed = [f"the environment ({env.name})"] * (True in theirs) + ["the reward"] * (False in theirs)
    late = any(DEADLINE_OPTION in t.reason for t in failed)
    deadline = f"reward.deadline above {reward.deadline:g} s, or " if late else ""
    raise RewardError(
        f"{len(failed)} of {len(everybody)} samples could not be scored "
        f"({dict(Counter(reason.split(':')[0] for reason in reasons))}){others}, for example {failed[0].sample_id}: "
        f"{reasons[0]}; fix {' and '.join(blamed)}, or raise {deadline}reward.max_error_rate above {most:g}"
    )
