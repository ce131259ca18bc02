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
        options={"fixed_length": 10},
    )
    expected = [(*per_sequence, 0.0)[i] for i in SEQUENCE.tolist()]
    assert scales.values.tolist() == pytest.approx(expected, abs=1e-15)
    assert (scales.tokens, scales.sequences) == (6, 3)
    assert scales.values.dtype == torch.float64


def test_one_sequence_per_sample_makes_sample_mean_the_sequence_mean():
    one, other = (
        token_scales(AGGREGATIONS[name].function, SEQUENCE, live=LIVE).values for name in ("sample_mean", "seq_mean")
    )
    assert torch.equal(one, other)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_nothing_live_gives_zeros(name):
    function, nobody = AGGREGATIONS[name].function, torch.zeros_like(LIVE)
    scales = token_scales(function, SEQUENCE, live=nobody, options={"fixed_length": 10})
    assert scales.values.abs().sum() == 0 and scales.tokens == 0 and scales.sequences == 0


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_tokens_that_do_not_count_are_as_if_absent(name):
    function, options = AGGREGATIONS[name].function, {"fixed_length": 10}
    counted = torch.tensor([True, False, True, False, True, True, True, True, False, True])
    sides = {"trajectory": TRAJECTORY, "group": GROUP}
    found = token_scales(function, SEQUENCE, live=LIVE, counted=counted, options=options, **sides)
    expected = token_scales(function, SEQUENCE[counted], live=LIVE, options=options, **sides)
    assert torch.equal(found.values[counted], expected.values)
    assert found.values[~counted].abs().sum() == 0
    assert (found.tokens, found.sequences) == (expected.tokens, expected.sequences) == (4, 2)


def test_only_the_fixed_length_is_an_option():
    assert {name: list(entry.options) for name, entry in AGGREGATIONS.items() if entry.options} == {
        "fixed": ["fixed_length"]
    }
    with pytest.raises(TypeError, match="fixed_length"):
        token_scales(AGGREGATIONS["fixed"].function, SEQUENCE, live=LIVE)
