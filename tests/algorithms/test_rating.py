"""What pairs and steps ask of the scores of a reward model, in numbers."""

from math import exp, log, nan

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import approx
from torch import Tensor
from torch.nn.functional import cross_entropy, softplus

from saccade.algorithms.objective import to_metrics
from saccade.forest.batch import Batch, Forest
from saccade.plugins.reward_models.reward_losses import (
    FIRST_LOG_KAPPA,
    REWARD_LOSSES,
    RatingLoss,
    StepsLoss,
    bt,
    hps,
    logexp,
    of_pairs,
    rating_objective,
    steps_objective,
)

FAST = settings(max_examples=20, deadline=None)
TIGHT = 1e-10
numbers = st.lists(st.floats(-80, 80), min_size=3, max_size=3)


def tensor(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


@FAST
@given(chosen=numbers, rejected=numbers, kappa=st.floats(0.01, 100))
def test_identities_of_the_formulas(chosen, rejected, kappa):
    chosen, rejected = tensor(*chosen), tensor(*rejected)
    found = logexp(chosen, rejected)
    assert torch.allclose(found, bt(chosen, rejected), rtol=0, atol=TIGHT)
    exact = softplus(rejected - chosen, threshold=700)  # above it, torch leaves the logarithm out
    assert torch.allclose(found, exact, rtol=0, atol=TIGHT)
    found, scaled = hps(chosen, rejected, kappa=kappa), kappa * torch.stack([chosen, rejected], -1)
    assert torch.allclose(found, bt(scaled[:, 0], scaled[:, 1]), rtol=0, atol=TIGHT)
    first = torch.zeros(3, dtype=torch.int64)
    assert torch.allclose(found, cross_entropy(scaled, first, reduction="none"), rtol=0, atol=TIGHT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", REWARD_LOSSES)
def test_a_gap_of_80_is_finite_and_exact(name, dtype):
    chosen = torch.tensor([-80.0, 80.0], dtype=dtype, requires_grad=True)
    options = {"kappa": 1.0} if name == "hps" else {}
    losses = REWARD_LOSSES[name].function(chosen, torch.zeros(2, dtype=dtype), **options)
    (gradient,) = torch.autograd.grad(losses.sum(), chosen)
    assert losses.tolist() == approx([80.0, 1.8048513878454153e-35], rel=1e-5)
    assert gradient.tolist() == approx([-1.0, -1.8048513878454153e-35], rel=1e-5)


IDS = ("a", "b", "c")
KEYS = tuple((id, side) for id in IDS for side in (0, 1))
# The golden pairs: chosen 1.2, -0.3, 0.5; rejected 0.7, 0.4, 0.5.
SCORES = torch.tensor([[1.2], [0.7], [-0.3], [0.4], [0.5], [0.5]], dtype=torch.float64)
FIRST = dict.fromkeys(IDS, (1.0,))


def rated(row: RatingLoss, labels=FIRST, scores=SCORES, margins=(), kappa=1.0):
    whole = of_pairs(row, IDS, labels, dict(margins))
    loss, stats = rating_objective(whole, scores, SCORES.new_tensor(kappa), KEYS)
    return loss.item(), to_metrics([stats]).means()


def row(loss: str = "bt", **changes) -> RatingLoss:
    return RatingLoss(loss=loss, heads={"preference": 1.0}, **changes)


@pytest.mark.parametrize(("what", "kappa", "value"), [
    (row(), 1.0, 0.75680340),
    (row("logexp"), 1.0, 0.75680340),
    (row(margin=0.1), 1.0, 0.80950419),
    (row("hps"), 1 / 0.07, 1.15375923),
    (row("hps"), 1.0, 0.70694604),
    (row(center_coef=0.01), 1.0, 0.75680340 + 0.01 * (1.9**2 + 0.1**2 + 1.0) / 3),
])  # fmt: skip
def test_golden_values(what, kappa, value):
    scores = SCORES.sigmoid() if what.loss == "hps" else SCORES  # as a bounded head gives them
    assert rated(what, scores=scores, kappa=kappa)[0] == approx(value, abs=1e-7)


def test_a_label_says_which_side_is_better():
    flipped = SCORES.view(3, 2, 1).flip(1).reshape(6, 1)
    loss, metrics = rated(row())
    other, swapped = rated(row(), dict.fromkeys(IDS, (-1.0,)), flipped)
    assert other == loss and swapped == approx(metrics, rel=1e-15)  # both sides in another order
    assert metrics["preference/accuracy"] == approx(1 / 3)  # a draw is not right
    assert metrics["preference/gap"] == approx(-0.2 / 3)
    assert metrics["preference/chosen_mean"] == approx(1.4 / 3)
    assert metrics["preference/rejected_mean"] == approx(1.6 / 3)
    assert metrics["preference/mean"] == approx(SCORES.mean().item())
    assert metrics["preference/square"] == approx((SCORES**2).mean().item())


def test_pairs_without_a_label_and_ties_teach_differently():
    one = {"a": (1.0,), "b": (nan,), "c": (nan,)}
    alone = log(1 + np.exp(-0.5))
    assert rated(row(tie_coef=0.5), one)[0] == approx(alone)
    loss, metrics = rated(row(tie_coef=0.5), one | {"b": (0.0,)})
    assert loss == approx((alone + 0.5 * 0.7) / 2)
    assert metrics["preference/accuracy"] == 1  # of the pairs that were decided
    assert rated(row(), dict.fromkeys(IDS, (nan,)))[0] == 0


def test_a_row_may_have_a_margin_of_its_own():
    plain, wide = rated(row(margin=0.1))[0], rated(row(margin=0.1), margins={"b": 2.0})[0]
    assert wide - plain == approx((log(1 + np.exp(2.7)) - log(1 + np.exp(0.8))) / 3)


def test_heads_are_weighed_and_counted_apart():
    labels = {"a": (1.0, nan), "b": (1.0, -1.0), "c": (1.0, nan)}
    scores = torch.cat([SCORES, 2 * SCORES], dim=1)
    loss, metrics = rated(RatingLoss(loss="bt", heads={"preference": 1.0, "size": 0.5}), labels, scores)
    assert loss == approx(0.75680340 + 0.5 * log(1 + np.exp(-1.4)), abs=1e-7)
    assert metrics["size/accuracy"] == 1 and metrics["size/gap"] == approx(1.4)


def test_micro_batches_add_up_and_the_scale_of_hps_learns():
    log_kappa = torch.tensor(FIRST_LOG_KAPPA, requires_grad=True)
    whole = of_pairs(row("hps", center_coef=0.01), IDS, FIRST, {})
    loss, _ = rating_objective(whole, SCORES, log_kappa.exp(), KEYS)
    parts = [rating_objective(whole, SCORES[i : i + 2], log_kappa.exp(), KEYS[i : i + 2])[0] for i in (0, 2, 4)]
    assert sum(parts).item() == approx(loss.item(), abs=1e-12)
    loss.backward()
    assert log_kappa.grad is not None and log_kappa.grad.item() != 0
    assert exp(FIRST_LOG_KAPPA) == approx(1 / 0.07)


def test_steps_are_a_cross_entropy_with_hard_and_soft_labels():
    labels = {"a": np.array([[1.0, 0.0], [0.3, 0.7]]), "b": np.array([[0.0, 1.0]])}
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0], [1.0, 0.5]], dtype=torch.float64)
    forest = Forest(
        rows=np.zeros(5, np.int64), row_lengths=np.array([3, 2]), sampled_runs=np.array([[1, 3], [4, 5]]),
        lengths=np.array([2, 1]), keys=(("a", 0), ("b", 0)), groups=np.array([0, 1]), media_lists=((),),
        media_index=np.array([0, 0]),
    )  # fmt: skip
    loss, stats = steps_objective(StepsLoss(labels=labels, count=3), logits, Batch(forest=forest))
    logp = logits.log_softmax(-1).numpy()
    wanted = -(logp[0, 0] + 0.3 * logp[1, 0] + 0.7 * logp[1, 1] + logp[2, 1]) / 3
    assert loss.item() == approx(wanted, abs=1e-6)
    metrics = to_metrics([stats]).means()
    assert metrics["steps/accuracy"] == approx(2 / 3)
    assert metrics["steps/label_mean"] == approx(1.3 / 3)
