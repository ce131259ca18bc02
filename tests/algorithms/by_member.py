"""The reference fixture by member, and the loss over the forests that it is packed into."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from saccade.algorithms.algorithm_state import restore
from saccade.algorithms.annotate import add_advantages
from saccade.algorithms.objective import LossSums, objective, to_metrics
from saccade.trainer.forward_inputs import loss_inputs

LENGTHS = (6, 4, 5, 3)
KEYS = [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
FIRST = [0, 6, 10, 15]  # tokens with which members begin
NO_KL = ("kl.coef=0", "clip_high=0.28", "advantage=no_std", "aggregation=token_mean")


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
    return total, to_metrics(stats).means()


def exact(values, rel=1e-6):
    return pytest.approx(values, rel=rel, abs=1e-7)


def advantaged(row, records, groups, *weights):
    """The forests of one update with their advantages, and metrics."""
    return add_advantages(records.packed([groups]), groups, row, restore(row, None), *weights)
