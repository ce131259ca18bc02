"""Small records; the reference fixture by member, and the loss over the forests that it is packed into."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from saccade.algorithms.algorithm_state import restore
from saccade.algorithms.annotate import add_advantages
from saccade.algorithms.objective import LossSums, add_sample_sizes, objective, to_metrics
from saccade.algorithms.select import Updates
from saccade.forest.batch import Batch
from saccade.forest.packing import pack
from saccade.trainer.forward_inputs import loss_inputs
from saccade.types import Group, Message, Sample, Source, Trajectory

LENGTHS = (6, 4, 5, 3)
KEYS = [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
FIRST = [0, 6, 10, 15]  # tokens with which members begin
NO_KL = ("kl.coef=0", "args.clip_high=0.28", "advantage=no_std", "aggregation=token_mean")


Rows = Mapping[tuple[str, int], Sequence[float]]  # of tokens, by member


def sampled(uid: str, repeat: int, prompt: Sequence[int], response: Sequence[int], **fields: Any) -> Trajectory:
    """An episode of one turn."""
    sources = np.repeat(np.array([Source.PROMPT, Source.POLICY], np.int8), [len(prompt), len(response)])
    policy = sources == Source.POLICY
    trajectory = Trajectory(
        sample_id=uid, repeat=repeat, ids=np.array([*prompt, *response], np.int64), sources=sources,
        logprobs=np.where(policy, -1.0, np.nan).astype(np.float32), versions=np.where(policy, 0, -1).astype(np.int32),
    )  # fmt: skip
    return replace(trajectory, **fields)


class Records:
    """Small groups, the forests of them, and their columns by member."""

    @staticmethod
    def member(uid: str, repeat: int, reward: float | None, tokens: int, **fields: Any) -> Trajectory:
        known = {"reward": reward, "outcome": reward, "status": "ok" if reward is not None else "error"}
        return sampled(uid, repeat, [1, 2, 3], range(10 + repeat, 10 + repeat + tokens), **known | fields)

    @classmethod
    def group(cls, uid: str, rewards: Sequence[float | None], tokens: Sequence[int] = (), **sample: Any) -> Group:
        lengths = tokens or [2] * len(rewards)
        members = [cls.member(uid, i, r, n) for i, (r, n) in enumerate(zip(rewards, lengths, strict=True))]
        message = Message(role="user", parts=("x",))
        asked = Sample(id=uid, messages=(message,), **sample)
        return Group(sample=asked, uid=uid, trajectories=tuple(members))

    @staticmethod
    def changed(group: Group, **columns: Sequence[Any]) -> Group:
        """With one value of each field per member."""
        members = [
            replace(t, **{name: values[i] for name, values in columns.items()})
            for i, t in enumerate(group.trajectories)
        ]
        return replace(group, trajectories=tuple(members))

    @staticmethod
    def packed(parts: Sequence[Sequence[Group]], micro_tokens: int = 1000, ends: bool = False) -> Updates:
        return [pack(part, micro_tokens=micro_tokens, ends=ends) for part in parts]

    @staticmethod
    def filled(updates: Updates, **columns: Rows) -> Updates:
        """With columns that are given by member."""

        def full(batch: Batch) -> Batch:
            found: dict[str, Any] = {
                name: np.concatenate([rows[key] for key in batch.keys]).astype(np.float32)
                for name, rows in columns.items()
            }
            return replace(batch, **found)

        return [[full(batch) for batch in batches] for batches in updates]

    @staticmethod
    def column(updates: Updates, name: str) -> dict[tuple[str, int], list[float]]:
        found: dict[tuple[str, int], list[float]] = {}
        for batches in updates:
            for batch in batches:
                for index, value in zip(batch.sequence, batch.per_target(name), strict=True):
                    found.setdefault(batch.keys[index], []).append(float(value))
        return found

    @classmethod
    def flat(cls, updates: Updates, name: str) -> np.ndarray:
        return np.concatenate(list(cls.column(updates, name).values()))


def rows(values):
    """A column of the fixture by member."""
    parts = torch.as_tensor(values).split(LENGTHS)
    return {key: part.tolist() for key, part in zip(KEYS, parts, strict=True)}


def loss_of(row, batches, new):
    """The loss of an optimizer step over its forests, and its metrics; `new` by member."""
    total, stats = 0.0, list[LossSums]()
    for batch in batches:
        current = torch.from_numpy(np.concatenate([new[key] for key in batch.keys]))
        loss, one = objective(row, current, None, loss_inputs(batch, current, images=False))
        total, stats = total + loss.item(), [*stats, one]
    metrics = to_metrics(stats)
    add_sample_sizes(metrics)
    return total, metrics.means()


def exact(values, rel=1e-6):
    return pytest.approx(values, rel=rel, abs=1e-7)


def advantaged(row, records, groups, *weights):
    """The forests of one update with their advantages, and metrics."""
    updates, count = add_advantages(records.packed([groups]), groups, row, restore(row, None), *weights)
    return updates, count()
