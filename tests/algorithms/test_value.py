"""What a critic learns, in numbers."""

import math

import pytest
import torch
from pytest import approx

from saccade.algorithms.objective import explained_variance, to_metrics, value_loss, value_objective


def tensor(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def reference() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """V, V_old and returns of the reference rows: GAE with discount 0.99 and lambda 0.95."""
    new, old, returns = [], [], []
    for i, (length, reward) in enumerate(zip((6, 4, 5, 3), (1, 0, 0.5, 2), strict=True)):
        values = [0.1 * math.cos(i + t) for t in range(length)]
        advantage, after, backwards = 0.0, 0.0, []
        for t in reversed(range(length)):
            gained = reward if t == length - 1 else 0.0
            advantage = gained + 0.99 * after - values[t] + 0.99 * 0.95 * advantage
            after = values[t]
            backwards.append(advantage + values[t])
        returns += backwards[::-1]
        old += values
        new += [v + 0.3 * math.sin(t) for t, v in enumerate(values)]
    return tensor(*new), tensor(*old), tensor(*returns)


def test_the_worse_of_both_counts_and_beyond_the_clip_nothing_pulls_on():
    #           inside, too far towards the return, too far away from it
    new = tensor(0.1, 0.5, -0.5).requires_grad_()
    losses, clipped = value_loss(new, tensor(0, 0, 0), tensor(1, 1, 1), clip=0.2)
    assert losses.tolist() == approx([0.5 * 0.9**2, 0.5 * 0.8**2, 0.5 * 1.5**2])
    assert clipped.tolist() == [False, True, False]
    (gradient,) = torch.autograd.grad(losses.sum(), new)
    assert gradient.tolist() == approx([-0.9, 0.0, -1.5])


def test_rounding_is_not_a_clip():
    generator = torch.Generator().manual_seed(0)
    new, old, returns = torch.randn(3, 1000, generator=generator)
    losses, clipped = value_loss(new, old, returns, clip=100.0)
    assert not clipped.any()
    assert torch.equal(losses, (new - returns).square() / 2)


@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_what_is_not_live_reaches_nothing(clip):
    nan = float("nan")
    new = tensor(1.0, nan, 3.0).requires_grad_()
    loss, stats = value_objective(new, tensor(1.0, nan, 0.0), tensor(0.0, nan, 4.0), tensor(0.5, 0, 0.5), clip=clip)
    means = to_metrics([stats]).means()
    wanted = 0.25 * (1 + (1 if clip == 0 else 3.8**2))
    assert loss.item() == approx(wanted) and means["critic/loss"] == approx(wanted)
    assert means["critic/value_mean"] == 2.0 and means["critic/clip_frac"] == (0.5 if clip else 0)
    loss.backward()
    assert new.grad is not None and new.grad.tolist() == approx([0.5, 0.0, -0.5 if clip == 0 else 0.0])


def test_micro_batches_add_up():
    new, old, returns = reference()
    scales = torch.full_like(new, 1 / len(new))
    columns = (new, old, returns, scales)
    whole = to_metrics([value_objective(*columns, clip=0.2)[1]]).means()
    parts = [
        value_objective(*(c[part] for c in columns), clip=0.2)[1] for part in (slice(0, 5), slice(5, 6), slice(6, 18))
    ]
    assert to_metrics(parts).means() == approx(whole)
    assert whole["critic/loss"] == approx(0.43915905, abs=1e-7)
    assert to_metrics([]).means() == {}


def test_explained_variance():
    returns, live = tensor(0, 1, 2, 3, 99), torch.tensor([True] * 4 + [False])
    assert explained_variance(returns, returns, live) == 1.0
    assert explained_variance(returns - 7, returns, live) == 1.0  # a shift leaves the variance
    assert explained_variance(tensor(5, 5, 5, 5, float("nan")), returns, live) == 0.0
    assert explained_variance(-returns, returns, live) == approx(1 - 4)
    assert explained_variance(returns / 2, returns, live) == approx(0.75)
    assert explained_variance(returns, torch.ones(5), live) is None
    assert explained_variance(returns, returns, torch.zeros(5, dtype=torch.bool)) is None
