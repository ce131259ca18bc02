from __future__ import annotations

import pytest
import torch

from saccade.algorithms.aggregation import AGGREGATIONS, token_scales

SEQUENCE = torch.tensor([0, 0, 0, 1, 2, 2, 3, 3, 3, 3])  # 3, 1, 2 and 4 tokens
LIVE = torch.tensor([True, True, True, False])
TRAJECTORY = torch.tensor([7, 7, 8, 9])
GROUP = torch.tensor([0, 1, 1, 1])


@pytest.mark.parametrize(
    ("name", "per_sequence"),
    [
        ("token_mean", (1 / 6, 1 / 6, 1 / 6)),
        ("seq_mean", (1 / 9, 1 / 3, 1 / 6)),
        ("seq_sum", (1 / 3, 1 / 3, 1 / 3)),
        ("fixed", (1 / 30, 1 / 30, 1 / 30)),
        ("sample_mean", (1 / 8, 1 / 8, 1 / 4)),
        ("group_mean", (1 / 6, 1 / 6, 1 / 6)),
        ("token_sum", (1, 1, 1)),
    ],
)
def test_scale_of_each_sequence(name, per_sequence):
    scales = token_scales(
        AGGREGATIONS[name].function,
        SEQUENCE,
        live=LIVE,
        trajectory=TRAJECTORY,
        group=GROUP,
        fixed_length=10,
    )
    expected = [(*per_sequence, 0.0)[i] for i in SEQUENCE.tolist()]
    assert scales.values.tolist() == pytest.approx(expected, abs=1e-15)
    assert (scales.tokens, scales.sequences) == (6, 3)
    assert scales.values.dtype == torch.float64


def test_one_sequence_per_sample_makes_sample_mean_the_sequence_mean():
    one, other = (
        token_scales(AGGREGATIONS[name].function, SEQUENCE, live=LIVE).values
        for name in ("sample_mean", "seq_mean")
    )
    assert torch.equal(one, other)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_nothing_live_gives_zeros(name):
    scales = token_scales(AGGREGATIONS[name].function, SEQUENCE, live=torch.zeros_like(LIVE))
    assert scales.values.abs().sum() == 0 and scales.tokens == 0 and scales.sequences == 0
