"""Distance of the policy to its reference, per token, from log-probs of sampled tokens only.

With u = new - ref. Every exponent is clamped first, so a gap of 80 is finite forward and backward.
Straight-through estimators are `(new - sg[new]) * slope + sg[value]`. Knows nothing of coefficients
or masks.

    >>> KINDS["k3"].function(new, ref)   # [T], gradient flows to `new`
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from saccade.algorithms.table import Entry

if TYPE_CHECKING:
    from torch import Tensor

Clamp = Literal["bounded", "zero"]
LARGEST_EXPONENT = 20.0
LARGEST_VALUE = 10.0  # of k3, and of the slopes of k2 and k3


def k1(new: Tensor, ref: Tensor) -> Tensor:
    return new - ref


def absolute(new: Tensor, ref: Tensor) -> Tensor:
    return (new - ref).abs()


def k2(new: Tensor, ref: Tensor) -> Tensor:
    return _with_slope_of_k2((new - ref).detach().square() / 2, new, ref)


def k3(new: Tensor, ref: Tensor, *, clamp: Clamp = "bounded") -> Tensor:
    gap = (new - ref).clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT)
    value = ((-gap).expm1() + gap).clamp(0, LARGEST_VALUE)
    if clamp == "zero":
        return value
    # A clamped value has no gradient exactly where the policy is furthest away: keep a bounded one.
    slope = (-(-gap).expm1()).clamp(-LARGEST_VALUE, 1).detach()
    return _straight_through(value, slope, new)


def k1_plus(new: Tensor, ref: Tensor) -> Tensor:
    return _with_slope_of_k2(k1(new, ref), new, ref)


def k3_plus(new: Tensor, ref: Tensor) -> Tensor:
    return _with_slope_of_k2(k3(new, ref), new, ref)


def _with_slope_of_k2(value: Tensor, new: Tensor, ref: Tensor) -> Tensor:
    return _straight_through(value, (new - ref).detach().clamp(-LARGEST_VALUE, LARGEST_VALUE), new)


def _straight_through(value: Tensor, slope: Tensor, new: Tensor) -> Tensor:
    return (new - new.detach()) * slope + value.detach()


KINDS: dict[str, Entry] = {
    # The gradient of k1 has mean zero and that of abs points by sign only: neither is a distance.
    "k1": Entry(function=k1, formula="u", in_loss=False),
    "abs": Entry(function=absolute, formula="|u|", in_loss=False),
    "k2": Entry(function=k2, formula="u^2 / 2"),
    "k3": Entry(function=k3, formula="exp(-u) - 1 + u"),
    "k1+": Entry(function=k1_plus, formula="u, with the gradient of k2"),
    "k3+": Entry(function=k3_plus, formula="exp(-u) - 1 + u, with the gradient of k2"),
}
