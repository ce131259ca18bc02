from __future__ import annotations

import pytest
import torch

from saccade.algorithms.filters import discard_reason, entropy_threshold, high_entropy, is_constant, share


def test_constant_is_a_matter_of_range():
    assert is_constant([0.3, 0.1 + 0.2])
    assert is_constant([1e9, 1e9 + 1])
    assert not is_constant([0.0, 1e-6])


def test_dynamic_sampling_keeps_groups_that_differ():
    groups = {"constant": [1.0], "low": [0.0] * 199 + [1.0], "high": [1.0] * 199 + [0.0], None: [1.0, 0.0, 0.0]}
    assert {reason: discard_reason(outcomes) for reason, outcomes in groups.items()} == {r: r for r in groups}
    assert discard_reason([0.0, 0.5], low=0.25, high=0.99) == "low"  # limits are open


def test_tokens_of_high_entropy_in_the_fixture(golden):
    entropies = 1 + (2 * golden.sequence + 3 * golden.position).double().sin()
    assert entropy_threshold(entropies, 0.2).item() == pytest.approx(1.5582395, abs=1e-7)
    keep = high_entropy(entropies, golden.live, golden.sequence, fraction=0.2)
    kept = zip(golden.sequence[keep].tolist(), golden.position[keep].tolist(), strict=True)
    assert list(kept) == [(0, 5), (1, 0), (1, 2), (2, 1)]


@pytest.mark.parametrize("fraction", [0.01, 0.3, 1.0])
@pytest.mark.parametrize("count", [1, 11])
def test_the_threshold_is_the_interpolated_quantile(fraction, count):
    noise = torch.Generator().manual_seed(count)
    entropies = torch.rand(count, generator=noise, dtype=torch.float64)
    expected = entropies.quantile(1 - fraction).item()
    assert entropy_threshold(entropies, fraction).item() == pytest.approx(expected, abs=1e-12)


def test_a_threshold_that_is_a_token_keeps_it():
    entropies, first = torch.arange(11.0), torch.zeros(11, dtype=torch.long)
    live = torch.ones(11, dtype=torch.bool)
    for tenths in range(1, 11):
        keep = high_entropy(entropies, live, first, fraction=tenths / 10)
        assert keep.sum() == tenths + 1


def test_high_entropy_by_sequence():
    entropies = torch.tensor([3.0, 1, 2, 5, 4, 9, 0.1, 0.2, 0.2, 7])
    sequence = torch.tensor([0, 0, 0, 0, 0, 2, 2, 1, 1, 1])
    live = torch.tensor([True] * 9 + [False])
    keep = high_entropy(entropies, live, sequence, fraction=0.4, scope="sequence")
    # two of five; one of two at least; the first of equals
    assert keep.nonzero().flatten().tolist() == [3, 4, 5, 7]


def test_a_share_is_rounded_down_but_one_at_least():
    assert [share(f, 100) for f in (2e-4, 0.29, 0.57, 0.999, 1.0)] == [1, 29, 57, 99, 100]
