"""Keyed sampling: the right distribution, the same noise everywhere, honest log-probs."""

import numpy as np
import pytest
import torch
from pytest import approx

from saccade.engines.embedded.sampling import allowed_ids, keyed_gumbel, sample
from saccade.types import Sampling

LOGITS = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0, -3.0, 1.5, -torch.inf]])
DRAWS = 20_000
# Upper 0.1 % points of chi-square by degrees of freedom.
CRITICAL = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 6: 22.46}


def draw(sampling, count=DRAWS, *, by="key", banned=None):
    """Many tokens of one row of logits: of as many trajectories, or of one trajectory."""
    many, zero = torch.arange(count), torch.zeros(count, dtype=torch.long)
    keys, index = (many * 7919, zero) if by == "key" else (zero + 12345, many)
    return sample(LOGITS.expand(count, -1), sampling, banned=banned, keys=keys, index=index)


def chi_square(ids, probabilities):
    counts = torch.bincount(ids, minlength=len(probabilities)).double()
    alive = probabilities > 0
    assert counts[~alive].sum() == 0
    expected = probabilities[alive].double() * len(ids)
    return ((counts[alive] - expected) ** 2 / expected).sum().item(), int(alive.sum()) - 1


@pytest.mark.parametrize("by", ["key", "index"])
@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(temperature=1.0), [0, 1, 2, 3, 4, 5, 6]),
        (Sampling(temperature=0.5), [0, 1, 2, 3, 4, 5, 6]),
        (Sampling(temperature=1.5, top_k=3), [0, 6, 1]),
        (Sampling(temperature=1.0, top_p=0.7), [0, 6, 1]),
        (Sampling(temperature=1.0, top_k=4, top_p=0.75), [0, 6, 1]),
    ],
)
def test_frequencies_and_log_probs_are_those_of_the_softmax(sampling, kept, by):
    scores = torch.full((8,), -torch.inf)
    scores[kept] = LOGITS[0, kept] / sampling.temperature
    drawn = draw(sampling, by=by)
    statistic, freedom = chi_square(drawn.ids, scores.softmax(-1))
    assert statistic < CRITICAL[freedom]
    wanted = scores.log_softmax(-1)[drawn.ids]
    assert drawn.logprobs.dtype == torch.float32
    assert (drawn.logprobs - wanted).abs().max() < 1e-6
    if sampling.truncated:
        assert (drawn.kept == (scores > -torch.inf)).all()
    else:
        assert drawn.kept is None


def test_banned_ids_are_never_drawn_and_take_no_mass():
    banned = torch.zeros(8, dtype=torch.bool)
    banned[0] = True
    drawn = draw(Sampling(), banned=banned)
    assert not (drawn.ids == 0).any()
    rest = LOGITS[0].masked_fill(banned, -torch.inf).log_softmax(-1)
    assert (drawn.logprobs - rest[drawn.ids]).abs().max() < 1e-6
    greedy = draw(Sampling(temperature=0.0), 1, banned=banned)
    assert greedy.ids.item() == 6 and greedy.logprobs.item() == approx(rest[6].item())


def test_greedy_ignores_the_noise_and_truncation():
    drawn = draw(Sampling(temperature=0.0, top_p=0.1), 5)
    assert drawn.ids.tolist() == [0] * 5 and drawn.kept is None


def test_noise_depends_on_key_index_and_id_alone():
    keys, index = torch.tensor([5, 5, 6, 2**62 + 5]), torch.tensor([0, 1, 0, 0])
    noise = keyed_gumbel(keys, index, 1000)
    assert torch.equal(noise, keyed_gumbel(keys, index, 1000))
    for row in range(4):
        alone = keyed_gumbel(keys[row : row + 1], index[row : row + 1], 1200)[0, :1000]
        assert torch.equal(noise[row], alone)
    correlation = np.corrcoef(noise.numpy()) - np.eye(4)
    assert np.abs(correlation).max() < 0.1


@pytest.mark.parametrize(
    ("key", "index", "wanted"),
    [
        (42, 3, [4.17324, 1.58871, 0.65857, -0.70618, 0.78267]),
        (2**62 + 99, 0, [-0.38787, 2.09394, 0.57846, 1.62118, 3.64392]),
        (2**31, 2**20, [-0.00246, -0.17343, 0.31664, 1.87383, -1.11874]),
    ],
)
def test_the_hash_is_that_of_unsigned_integers(key, index, wanted):
    """A change of the hash changes every seeded run: it must be meant."""
    noise = keyed_gumbel(torch.tensor([key]), torch.tensor([index]), 5)
    assert noise[0].tolist() == approx(wanted, rel=1e-4, abs=1e-5)


def test_kept_ids():
    scores = torch.log(torch.tensor([[0.4, 0.1, 0.3, 0.2], [0.25, 0.25, 0.25, 0.25]]))

    def kept(top_k=-1, top_p=1.0):
        return [np.flatnonzero(row).tolist() for row in allowed_ids(scores, top_k, top_p).numpy()]

    assert kept(top_k=2)[0] == [0, 2] and len(kept(top_k=2)[1]) == 2
    assert kept(top_p=0.39)[0] == [0]  # the first that reaches p is kept
    assert kept(top_p=0.41)[0] == [0, 2]
    assert kept(top_p=0.95)[0] == [0, 1, 2, 3]
    assert kept(top_p=1e-9) == [[0], kept(top_k=1)[1]]  # never none
    # p counts within the k likeliest: 0.4 / 0.7 is above 0.5.
    assert kept(top_k=2, top_p=0.5)[0] == [0]
    assert kept(top_k=99)[0] == [0, 1, 2, 3]
    banned = torch.tensor([[1.0, -torch.inf, 0.0]])
    assert allowed_ids(banned, 3, 1.0).tolist() == [[True, False, True]]
