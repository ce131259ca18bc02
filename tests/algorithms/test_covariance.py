from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from saccade.algorithms.policy_losses import SelectionInputs, clip
from saccade.plugins.more_algorithms.more_losses import covariance, most_covariant, some_covariant

BAND = {"cov_low": -10.0, "cov_high": 10.0}


@pytest.fixture
def tokens() -> SelectionInputs:
    noise = torch.Generator().manual_seed(3)
    old = -torch.rand(200, generator=noise, dtype=torch.float64)
    return SelectionInputs(
        old=old,
        new=old + 0.3 * torch.randn(200, generator=noise, dtype=torch.float64),
        advantages=torch.randn(200, generator=noise, dtype=torch.float64),
        noise=torch.randperm(200, generator=noise),
    )


def shuffled(tokens: SelectionInputs, order: torch.Tensor) -> SelectionInputs:
    return SelectionInputs(**{name: column[order] for name, column in vars(tokens).items()})


def test_the_largest_covariances_are_selected(tokens):
    chosen = most_covariant(tokens, cov_fraction=0.05)
    assert chosen.sum() == 10
    assert covariance(tokens)[chosen].min() > covariance(tokens)[~chosen].max()


def test_at_least_one_token_is_selected_if_there_is_one(tokens):
    assert most_covariant(tokens).sum() == 1
    assert some_covariant(tokens, cov_low=0.0).sum() == 1
    assert some_covariant(tokens, cov_low=50.0, cov_high=60.0).sum() == 0


def test_order_changes_no_selection(tokens):
    order = torch.randperm(200, generator=torch.Generator().manual_seed(5))
    tied = replace(tokens, advantages=torch.full_like(tokens.advantages, 0.1))
    for inputs in (tokens, tied):
        for select in (most_covariant, some_covariant):
            options = {"cov_fraction": 0.1} | (BAND if select is some_covariant else {})
            expected = select(inputs, **options)
            assert expected.sum() == 20
            assert torch.equal(select(shuffled(inputs, order), **options), expected[order])


def test_candidates_lie_in_the_band_and_have_a_gradient(tokens):
    chosen = some_covariant(tokens, cov_fraction=1.0, cov_low=0.1, cov_high=0.3)
    ratio, advantages = (tokens.new - tokens.old).exp(), tokens.advantages
    active = ~((advantages > 0) & (ratio > 1.2)) & ~((advantages < 0) & (ratio < 0.8))
    inside = (covariance(tokens) > 0.1) & (covariance(tokens) < 0.3)
    assert 0 < chosen.sum() < inside.sum()
    assert torch.equal(chosen, inside & active)


def test_the_clip_stops_none_of_the_candidates(golden):
    _, indicators = clip(golden.wide, golden.inputs())
    chosen = golden.selected("clip_cov", golden.wide, BAND | {"cov_fraction": 1.0})
    assert torch.equal(chosen, ~indicators["clip_low"] & ~indicators["clip_high"])


def test_the_smallest_noise_is_chosen(tokens):
    chosen = some_covariant(tokens, cov_fraction=0.1, clip_low=9.0, clip_high=1e9, **BAND)
    assert torch.equal(chosen, tokens.noise < 20)
