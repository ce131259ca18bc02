"""Random ragged steps, and losses and gradients of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from saccade.algorithms.advantages import ADVANTAGES, AdvantageInputs, compute
from saccade.algorithms.aggregation import AGGREGATIONS, token_scales
from saccade.algorithms.corrections import apply, measure, self_normalise
from saccade.algorithms.filters import high_entropy
from saccade.algorithms.objective import objective
from saccade.algorithms.policy_losses import LOSSES, LossInputs, SelectionInputs
from saccade.algorithms.resolved_algorithm import Algorithm

GROUP_ESTIMATORS = [name for name, entry in ADVANTAGES.items() if entry.group]
FAST = settings(max_examples=12, deadline=None)
TIGHT = 1e-10
PER_MEMBER = (
    *("rewards", "groups", "live", "baseline", "lengths"),
    *("final_values", "greedy", "components", "domain_weights", "drift"),
)
PER_TOKEN = ("sequence", "token_penalties", "values")


@dataclass(frozen=True, kw_only=True)
class Step:
    """A whole step: members in groups, and the log-probs of their tokens."""

    members: AdvantageInputs
    old: Tensor
    new: Tensor
    ref: Tensor
    rollout: Tensor
    entropy: Tensor
    noise: Tensor  # int64, who a token is


TOKENS = ("old", "new", "ref", "rollout", "entropy", "noise")
ROUNDED = (0.0, 0.1, 0.5, 1.0, 2.0)
EXACT = (0.0, 0.25, 0.5, 1.0, 2.0)  # sums have no rounding, so no order makes a 0 positive


@st.composite
def steps(draw: st.DrawFn, rewards: Sequence[float] = ROUNDED) -> Step:
    sizes = draw(st.lists(st.integers(2, 4), min_size=1, max_size=4))
    members = sum(sizes)
    lengths = torch.tensor(draw(st.lists(st.integers(1, 6), min_size=members, max_size=members)))
    grid = st.sampled_from(rewards)
    scores, other = (
        torch.tensor(draw(st.lists(grid, min_size=members, max_size=members)), dtype=torch.float64) for _ in range(2)
    )
    groups = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    noise = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    tokens = int(lengths.sum())

    def spread(scale: float, count: int = tokens) -> Tensor:
        return scale * torch.randn(count, generator=noise, dtype=torch.float64)

    old = -spread(1).abs()
    every, zeros = torch.ones(members, dtype=torch.bool), torch.zeros(tokens, dtype=torch.float64)
    inputs = AdvantageInputs(
        rewards=scores, groups=groups, live=every, baseline=every, lengths=lengths, token_penalties=zeros,
        sequence=torch.arange(members).repeat_interleave(lengths), values=spread(0.3),
        final_values=spread(0.3, members), greedy=spread(1, len(sizes))[groups],
        components=torch.stack([scores, other], 1), component_weights=torch.tensor([1, 0.5], dtype=torch.float64),
        domain_weights=spread(1, len(sizes)).exp()[groups], drift=spread(1, members).abs(),
    )  # fmt: skip
    return Step(
        members=inputs, old=old, new=old + spread(0.4), ref=old + spread(0.4), rollout=old + spread(0.05),
        entropy=spread(1).abs(), noise=torch.randperm(tokens, generator=noise),
    )  # fmt: skip


def advantages(name: str, members: AdvantageInputs, options=None, **changes) -> Tensor:
    return compute(ADVANTAGES[name].with_options(options or {}), replace(members, **changes)).values


def chosen(order: Tensor, members: AdvantageInputs) -> tuple[AdvantageInputs, Tensor]:
    """The members in another order, or some of them, and which tokens those are."""
    tokens = torch.cat([torch.where(members.sequence == member)[0] for member in order])
    columns = {name: getattr(members, name)[order] for name in PER_MEMBER}
    columns |= {name: getattr(members, name)[tokens] for name in PER_TOKEN}
    columns["sequence"] = torch.arange(len(order)).repeat_interleave(members.lengths[order])
    return replace(members, **columns), tokens


def loss_and_gradient(
    name: str, step: Step, scales: Tensor, advantages: Tensor, old: Tensor, **options: float | str
) -> tuple[Tensor, Tensor]:
    """Options that the loss does not have are ignored."""
    sequence, count = step.members.sequence, len(step.members.rewards)
    inputs = LossInputs(
        old=old, advantages=advantages, sequence=sequence, sequences=count, scales=torch.ones_like(old),
        rewards=step.members.rewards[sequence],
    )  # fmt: skip
    new = step.new.clone().requires_grad_()
    losses, _ = LOSSES[name].with_options(options)(new, inputs)
    total = (losses * scales).sum()
    return total.detach(), torch.autograd.grad(total, new)[0]


def scales_of(name: str, members: AdvantageInputs) -> Tensor:
    entry = AGGREGATIONS[name].with_options({"fixed_length": 7})
    return token_scales(entry, members.sequence, live=members.live, group=members.groups)[0]


def same(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=TIGHT, atol=TIGHT)


def columns_of(algorithm: Algorithm, step: Step) -> LossInputs:
    """What a step is given before training on it, over all of its members."""
    members, sequence = step.members, step.members.sequence
    if algorithm.kl_in_reward:
        distance = algorithm.divergence(step.old, step.ref)
        members = replace(members, token_penalties=algorithm.kl.coef * distance)
    result = compute(algorithm.estimator, members, adv_clip=algorithm.adv_clip, drop_constant=algorithm.drop_constant)

    def scales_over(counted: Tensor | None) -> Tensor:
        sides = {"live": result.live, "group": members.groups}
        return token_scales(algorithm.aggregate, sequence, counted=counted, **sides)[0]

    scales = scales_over(None)
    live = scales > 0
    mismatch = measure(step.old, step.rollout, live=live, sequence=sequence, sequences=len(result.live))
    found = apply(algorithm.at_once, mismatch)
    keep = live if found.keep is None else live & found.keep
    if algorithm.entropy_top:
        scope = algorithm.entropy_scope
        keep = keep & high_entropy(step.entropy, live, sequence, fraction=algorithm.entropy_top, scope=scope)
    factor = keep.double()
    if algorithm.denominator == "kept":
        factor = (scales_over(keep) / scales).where(keep, 0.0)
    weights = found.weights
    if algorithm.self_normalise and weights is not None:
        weights = self_normalise(weights, live)
    selected = None
    if algorithm.loss.select is not None and live.any():
        inputs = SelectionInputs(
            new=step.new[live], old=step.old[live], advantages=result.values[live], noise=step.noise[live]
        )
        picked = algorithm.loss.bound("select")(inputs)
        selected = torch.zeros_like(live).masked_scatter(live, picked)
    elif algorithm.loss.select is not None:
        selected = live
    return LossInputs(
        advantages=result.values, scales=scales, sequence=sequence, sequences=len(members.rewards), old=step.old,
        rollout=step.rollout, ref=step.ref, keep=factor, weights=weights, rewards=members.rewards[sequence],
        selected=selected,
    )  # fmt: skip


def train(algorithm: Algorithm, step: Step, parts: Sequence[Tensor] | None = None):
    """(loss, gradients of the log-probs and of the entropy), the members in micro-batches."""
    known = columns_of(algorithm, step)
    new, entropy = (x.clone().requires_grad_() for x in (step.new, step.entropy))
    total = torch.zeros((), dtype=torch.float64)
    for part in parts or [torch.arange(len(step.members.rewards))]:
        batch, tokens = chosen(part, step.members)
        cut: dict[str, Any] = {name: value[tokens] for name, value in vars(known).items() if isinstance(value, Tensor)}
        cut |= {"sequence": batch.sequence, "sequences": len(part)}
        columns = replace(known, **cut)
        loss, _ = objective(algorithm, new[tokens], entropy[tokens], columns)
        loss.backward()
        total = total + loss.detach()
    assert new.grad is not None
    return total, new.grad, torch.zeros_like(new) if entropy.grad is None else entropy.grad
