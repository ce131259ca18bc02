import pytest
import torch

from saccade.algorithms.aggregation import AGGREGATIONS, token_scales

SEQUENCE = torch.tensor([0, 0, 0, 1, 2, 2, 3, 3, 3, 3])  # 3, 1, 2 and 4 tokens
LIVE = torch.tensor([True, True, True, False])
GROUP = torch.tensor([0, 1, 1, 1])


def entry_of(name):
    return AGGREGATIONS[name].with_options({"fixed_length": 10})


@pytest.mark.parametrize(("name", "per_sequence"), [
    ("token_mean", (1 / 6, 1 / 6, 1 / 6)),
    ("seq_mean", (1 / 9, 1 / 3, 1 / 6)),
    ("seq_sum", (1 / 3, 1 / 3, 1 / 3)),
    ("fixed", (1 / 30, 1 / 30, 1 / 30)),
    ("sample_mean", (1 / 9, 1 / 3, 1 / 6)),  # a sample is one sequence
    ("group_mean", (1 / 6, 1 / 6, 1 / 6)),
    ("token_sum", (1, 1, 1)),
])  # fmt: skip
def test_scale_of_each_sequence(name, per_sequence):
    scales, lengths = token_scales(entry_of(name), SEQUENCE, live=LIVE, group=GROUP)
    expected = [(*per_sequence, 0.0)[i] for i in SEQUENCE.tolist()]
    assert scales.tolist() == pytest.approx(expected, abs=1e-15)
    assert lengths.tolist() == [3, 1, 2, 0] and scales.dtype == torch.float64


def test_sequences_of_one_sample_are_pooled():
    lengths, sample = SEQUENCE.bincount() * LIVE, torch.tensor([7, 7, 8, 9])
    assert AGGREGATIONS["sample_mean"](lengths, sample, GROUP).tolist() == [1 / 8, 1 / 8, 1 / 4, 0]


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_what_does_not_count_is_as_if_absent(name):
    entry = entry_of(name)
    counted = torch.tensor([True, False, True, False, True, True, True, True, False, True])
    found, lengths = token_scales(entry, SEQUENCE, live=LIVE, counted=counted, group=GROUP)
    expected, _ = token_scales(entry, SEQUENCE[counted], live=LIVE, group=GROUP)
    assert torch.equal(found[counted], expected) and not found[~counted].any()
    assert lengths.tolist() == [2, 0, 2, 0]
    nothing, lengths = token_scales(entry, SEQUENCE, live=torch.zeros_like(LIVE))
    assert not nothing.any() and not lengths.any()
