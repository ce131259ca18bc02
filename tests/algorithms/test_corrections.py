import math

import pytest
import torch

from saccade.algorithms.corrections import CORRECTIONS, apply, measure
from saccade.errors import ConfigError
from saccade.plugins.more_algorithms.more_losses import opsm

NAN = float("nan")
ONCE = {name: entry for name, entry in CORRECTIONS.items() if not entry.each_update}


def gaps(rows: list[list[float]]):
    """A mismatch of rows of delta; NaN: unscored."""
    rollout = torch.tensor([-x for row in rows for x in row], dtype=torch.float64)
    sequence = torch.tensor([i for i, row in enumerate(rows) for _ in row])
    live = torch.ones(len(rollout), dtype=torch.bool)
    return measure(torch.zeros_like(rollout), rollout, live=live, sequence=sequence, sequences=len(rows))


def test_truncated_weights_of_the_fixture(golden):
    weights = CORRECTIONS["tis.token"].function(golden.mismatch).weights
    assert weights.mean().item() == pytest.approx(0.99365108, abs=1e-7)
    first = golden.position == 0
    weights = CORRECTIONS["tis.sequence"].function(golden.mismatch).weights
    expected = [1.003107, 0.911547, 1.053767, 0.915957]
    assert weights[first].tolist() == pytest.approx(expected, abs=1e-6)
    weights = CORRECTIONS["tis.geometric"].function(golden.mismatch).weights
    lengths = [6, 4, 5, 3]
    roots = [w ** (1 / n) for w, n in zip(expected, lengths, strict=True)]
    assert weights[first].tolist() == pytest.approx(roots, abs=1e-6)


@pytest.mark.parametrize(("name", "band", "kept"), [
    ("reject.token.k1", {"low": 0.97, "high": 1.03}, 7),
    ("reject.seq_mean.k1", {"low": 0.99, "high": 1.01}, 6),
    ("seq_mask", {}, 6),
    ("reject.seq_sum.k1", {"low": 0.9, "high": 1.1}, 18),
    ("reject.token.k3", {"high": 0.001}, 13),
    ("reject.seq_max.k3", {"high": 0.0012}, 12),
    ("icepop", {"low": 0.97, "high": 1.03}, 7),
])  # fmt: skip
def test_kept_tokens_of_the_fixture(golden, name, band, kept):
    assert CORRECTIONS[name].function(golden.mismatch, **band).keep.sum() == kept


@pytest.mark.parametrize(("name", "band", "kept"), [
    ("reject.token.k2", {"high": 0.5}, [True, True, False, True]),
    ("reject.seq_sum.k2", {"high": 0.5}, [True, True, False, False]),
    ("reject.seq_mean.k2", {"high": 0.9}, [True, True, False, False]),
    ("reject.seq_max.k2", {"high": 1.9}, [True, True, False, False]),
    ("reject.seq_sum.k3", {"high": 0.8}, [True, True, False, False]),
    ("reject.seq_sum.k1", {"low": 0.0, "high": math.e**1.9}, [True, True, False, False]),
])  # fmt: skip
def test_rejection_by_sums_means_and_maxima(name, band, kept):
    mismatch = gaps([[0.5, -0.5], [2.0, 0.0]])
    assert CORRECTIONS[name].function(mismatch, **band).keep.tolist() == kept


@pytest.mark.parametrize("name", ONCE)
def test_an_unscored_token_weighs_one_and_says_nothing(name):
    scored, missing = gaps([[0.3, 0.4], [0.0]]), gaps([[0.3, NAN, 0.4], [NAN, NAN]])
    entry, present = ONCE[name], torch.tensor([0, 2])
    options = {"low": 0.0, "high": 1.4} if "low" in entry.options else {"high": 0.06}
    expected = entry.with_options(options)(scored)
    found = entry.with_options(options)(missing)
    if found.weights is not None:
        assert torch.equal(found.weights[present], expected.weights[:2])
        assert found.weights[1] == 1 and found.weights[3:].tolist() == [1, 1]
    if found.keep is not None:
        assert torch.equal(found.keep[present], expected.keep[:2])
        assert found.keep[3:].all()


def test_masks_multiply_and_only_one_may_give_weights(golden):
    first = CORRECTIONS["reject.token.k1"].with_options({"low": 0.97, "high": 1.03})
    second = CORRECTIONS["reject.seq_max.k3"].with_options({"high": 0.0012})
    third = CORRECTIONS["tis.token"].with_options({"high": 1.01})
    found = apply([first, second, third], golden.mismatch)
    assert found.keep is not None and found.weights is not None
    one, other = (entry(golden.mismatch).keep for entry in (first, second))
    assert torch.equal(found.keep, one & other)
    assert found.weights.max() == 1.01
    nothing = apply([], golden.mismatch)
    assert nothing.weights is None and nothing.keep is None
    with pytest.raises(ConfigError, match="two corrections weigh tokens"):
        apply([CORRECTIONS["tis.token"], CORRECTIONS["tis.sequence"]], golden.mismatch)


def test_opsm_drops_bad_sequences_that_the_policy_left_behind(golden):
    mean = golden.inputs().sequence_mean
    behind = golden.rollout - 1.0
    keep = opsm(behind, golden.rollout, golden.advantages, mean, threshold=0.9)
    assert torch.equal(keep, golden.advantages > 0)
    assert opsm(behind, golden.rollout, golden.advantages, mean, threshold=1.1).all()
    holes = golden.rollout.where(golden.position != 1, NAN)  # the mean is over the others
    assert torch.equal(opsm(behind, holes, golden.advantages, mean, threshold=0.9), keep)
    unknown = torch.full_like(holes, NAN)
    assert opsm(behind, unknown, golden.advantages, mean, threshold=0.0).all()
