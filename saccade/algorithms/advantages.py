"""Rewards become advantages, over whole groups of a whole step, in float64 on the CPU.

An estimator is `f(inputs, *, options) -> [T]`. What holds for all of them is done once, in
`compute`: a group shrunk to one member does not train, a constant group gets exactly 0, whitening
happens at most once, the clip comes last. Knows nothing of losses, masks or how rewards were made.
Axes: S members (sequences), T policy tokens.

    >>> compute(ADVANTAGES["grpo"], inputs, {"std_eps": 1e-4}).values
    tensor([ 0.7070,  0.7070, -0.7070], dtype=torch.float64)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from saccade.algorithms.advantage_inputs import AdvantageInputs
from saccade.algorithms.filters import is_constant
from saccade.algorithms.table import Entry, Share, add, bound
from saccade.registry import Table

if TYPE_CHECKING:
    from torch import Tensor

ADVANTAGES: Table[Entry] = Table("advantages", {})

# -- one number per member -------------------------------------------------------------------------


@add(ADVANTAGES, "(R - mean_g) / (std_g + std_eps)", group=True)
def grpo(inputs: AdvantageInputs, *, std_eps: float = 1e-6) -> Tensor:
    """arXiv 2402.03300"""
    return inputs.per_token(standardised(inputs, std_eps))


@add(ADVANTAGES, "R - mean_g, whitened over the tokens", name="reinforce_pp_baseline", group=True, whiten=True)
@add(ADVANTAGES, "R - mean_g", group=True)
def no_std(inputs: AdvantageInputs) -> Tensor:
    """Dr. GRPO, arXiv 2503.20783: without a divisor easy and hard prompts weigh as their spread."""
    return inputs.per_token(inputs.centred)


@add(ADVANTAGES, "R - mean of the other members", group=True)
def rloo(inputs: AdvantageInputs) -> Tensor:
    """arXiv 2402.14740"""
    others = (inputs.group_size - 1).clamp(min=1)
    baseline = (inputs.group_sum(inputs.scores) - inputs.scores) / others
    return inputs.per_token(inputs.scores - baseline)


# -- one number per token --------------------------------------------------------------------------


@add(ADVANTAGES, "discounted return from t on, whitened over the tokens of the step", name="reinforce_pp", whiten=True)
@add(ADVANTAGES, "discounted return from t on", name="reinforce", whiten=False)
def returns(inputs: AdvantageInputs, *, gamma: float = 1.0) -> Tensor:
    return inputs.sum_from(inputs.token_rewards, gamma)


@add(ADVANTAGES, "return from t on - R of a greedy rollout", greedy=True)
def remax(inputs: AdvantageInputs) -> Tensor:
    """arXiv 2310.10505"""
    assert inputs.greedy is not None
    return returns(inputs) - inputs.per_token(inputs.greedy)


@add(ADVANTAGES, "A_t = r_t + gamma V_t+1 - V_t + gamma lam A_t+1, whitened over the step", whiten=True, critic=True)
def gae(inputs: AdvantageInputs, *, gamma: float = 1.0, lam: Share = 0.95) -> Tensor:
    """arXiv 1506.02438"""
    assert inputs.values is not None
    final = inputs.final_values
    end = inputs.values.new_zeros(()) if final is None else inputs.per_token(final)
    following = inputs.values.roll(-1).where(~inputs.ends, end)
    surprise = inputs.token_rewards + gamma * following - inputs.values
    return inputs.sum_from(surprise, gamma * lam)


# -- what holds for every estimator ----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Advantages:
    values: Tensor  # [T] float64, 0 where the member is not live
    returns: Tensor | None  # [T] what the critic learns, 0 where not live; None without a critic
    live: Tensor  # [S] bool, without singletons and, if wanted, without constant groups
    constant_low: int  # groups, by whether their common reward is below 1/2
    constant_high: int
    singleton: int
    no_baseline: int  # groups whose greedy rollout failed
    clip_frac: float  # live tokens beyond adv_clip, before it acts


def compute(
    estimator: Entry,
    inputs: AdvantageInputs,
    options: Mapping[str, Any] = MappingProxyType({}),
    *,
    whiten: bool | None = None,
    whiten_std: bool = True,
    adv_clip: float = 0.0,
    drop_constant: bool = False,
) -> Advantages:
    """`whiten` None: as the estimator has it; `adv_clip` 0: off."""
    whiten = estimator.whiten if whiten is None else whiten
    assert not (whiten and estimator.whiten is None), "an estimator that is never whitened"
    inputs, no_baseline = _present(estimator, inputs)
    nobody = inputs.live & ~inputs.live
    singleton = inputs.live & (inputs.live_in_group < 2) if estimator.group else nobody
    live = inputs.live & ~singleton
    constant = live & _constant(estimator, inputs) if estimator.group else nobody
    inputs = replace(inputs, live=live & ~constant if drop_constant else live)

    live_tokens = inputs.per_token(inputs.live)
    raw = bound(estimator.function, options)(inputs).where(live_tokens, 0.0)
    values = whitened(raw, live_tokens, std=whiten_std) if whiten else raw
    # Also after whitening: its shift would push a group that says nothing.
    values = values.where(~inputs.per_token(constant), 0.0)
    clip_frac = 0.0
    if adv_clip > 0:
        beyond = (values.abs() > adv_clip).sum() / live_tokens.sum().clamp(min=1)
        clip_frac, values = float(beyond), values.clamp(-adv_clip, adv_clip)
    assert bool(values.isfinite().all()), "advantages must be finite"
    low, critic = inputs.scores < 0.5, inputs.values
    return Advantages(
        values=values,
        returns=None if critic is None else (raw + critic).where(live_tokens, 0.0),
        live=inputs.live,
        constant_low=count_groups(inputs.groups[constant & low]),
        constant_high=count_groups(inputs.groups[constant & ~low]),
        singleton=count_groups(inputs.groups[singleton]),
        no_baseline=count_groups(inputs.groups[no_baseline]),
        clip_frac=clip_frac,
    )


def whitened(values: Tensor, live: Tensor, *, std: bool = True) -> Tensor:
    """[T] -> [T]: zero mean and, with `std`, unit variance over live tokens; 0 elsewhere."""
    inside = values[live]
    if not len(inside) or is_constant([float(inside.min()), float(inside.max())]):
        return values.new_zeros(len(values))  # not the rounding of the mean, scaled up
    scale = (inside.var() + 1e-8).sqrt() if std and len(inside) > 1 else 1.0
    return ((values - inside.mean()) / scale).where(live, 0.0)


def _present(estimator: Entry, inputs: AdvantageInputs) -> tuple[AdvantageInputs, Tensor]:
    """Without members that have no tokens or no greedy reward to compare with, and the latter."""
    present, no_baseline = inputs.lengths > 0, inputs.live & ~inputs.live
    if estimator.greedy:
        assert inputs.greedy is not None
        no_baseline = inputs.live & present & ~inputs.greedy.isfinite()
        present = present & inputs.greedy.isfinite()
    live, baseline = inputs.live & present, inputs.baseline & present
    return replace(inputs, live=live, baseline=baseline), no_baseline


def _constant(estimator: Entry, inputs: AdvantageInputs) -> Tensor:
    """[S] bool; where terms are compared one by one, all of them must be constant."""
    if not estimator.components:
        return inputs.constant
    assert inputs.components is not None
    return reduce(and_, map(inputs.same, inputs.components.T))


def standardised(inputs: AdvantageInputs, std_eps: float) -> Tensor:
    # With std_eps=0 a constant group would be 0/0.
    return (inputs.centred / (inputs.group_std + std_eps)).where(~inputs.constant, 0.0)


def count_groups(groups: Tensor) -> int:
    return len(groups.unique())
