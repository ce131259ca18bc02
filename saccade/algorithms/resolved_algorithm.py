"""`Algorithm`: the fully resolved `algorithm` section of a config, with values from other sections.

`build.build` makes it. Imports no torch.

    >>> algorithm.loss(new, inputs)   # the chosen function, with its options
"""

from collections.abc import Mapping
from typing import Literal

from saccade.algorithms.advantages import ADVANTAGES
from saccade.algorithms.aggregation import AGGREGATIONS
from saccade.algorithms.corrections import CORRECTIONS
from saccade.algorithms.policy_losses import KINDS, LOSSES
from saccade.algorithms.table import Entry
from saccade.config.schema import AlgorithmConfig

AXES: Mapping[str, Mapping[str, Entry]] = {
    "advantage": ADVANTAGES,
    "policy_loss": LOSSES,
    "aggregation": AGGREGATIONS,
    "kl.kind": KINDS,
    "correct": CORRECTIONS,
}


class Algorithm(AlgorithmConfig):
    """Every option holds the value in effect; `old` is never auto."""

    about: str
    paper: str
    samples_per_prompt: int
    updates_per_step: int
    sequences: int  # per step
    max_tokens: int  # limit of sampled tokens per episode
    reward_clip: tuple[float, float] | None
    reward_normalise: Literal["off", "std", "mean_std"]
    # The entry chosen on each of AXES, with its options.
    estimator: Entry
    loss: Entry
    aggregate: Entry
    divergence: Entry
    corrections: tuple[Entry, ...]

    @property
    def chosen(self) -> dict[str, tuple[Entry, ...]]:
        alone = (self.estimator, self.loss, self.aggregate, self.divergence)
        return dict(zip(AXES, [*((entry,) for entry in alone), self.corrections], strict=True))

    @property
    def needs_reference(self) -> bool:
        return self.kl.coef > 0

    @property
    def needs_critic(self) -> bool:
        return self.estimator.critic

    def is_warming(self, step: int) -> bool:
        """Whether only the critic learns in this step."""
        return self.needs_critic and step <= self.critic.warmup_steps

    @property
    def kl_in_loss(self) -> bool:
        return self.needs_reference and self.kl.place == "loss"

    @property
    def kl_in_reward(self) -> bool:
        return self.needs_reference and self.kl.place == "reward"

    @property
    def drops_early(self) -> bool:
        """Whether rewards alone decide that a group is constant, so that it can be dropped before any forward."""
        decided = not (self.kl_in_reward or (self.exclude_status and self.excluded_in_baseline))
        return self.drop_constant and self.estimator.group and decided

    @property
    def reference_moves(self) -> bool:
        return self.needs_reference and self.kl.update != "none"

    @property
    def warnings(self) -> tuple[str, ...]:
        own, now, loss = self.loss.own_aggregation, self.aggregation, self.policy_loss
        delta, high = (self.loss.options.get(name) or 0 for name in ("delta", "clip_high"))
        found = {
            f"algorithm.aggregation={now}: policy loss {loss} is made for {own}; long sequences weigh more now": own
            not in (None, now),
            f"algorithm.args.delta={delta:g} is not above 1 + clip_high = {1 + high:g} and cuts ratios inside it; "
            "algorithm.args.delta=4 is usual": 0 < delta <= 1 + high,
        }
        return tuple(text for text, so in found.items() if so)

    @property
    def at_once(self) -> tuple[Entry, ...]:
        """Corrections that are the same for every update of a step."""
        return tuple(c for c in self.corrections if not c.each_update)

    @property
    def allows_older(self) -> bool:
        """Whether tokens that older weights sampled are weighed, or the loss is made for them."""
        by_loss = self.old == "rollout" and (self.loss.ratio or bool(self.loss.older))
        return by_loss or any(c.weighs for c in self.corrections)

    @property
    def in_loss(self) -> tuple[Entry, ...]:
        """Corrections that the loss computes from its own log-probs (old=detach); others are columns of a batch."""
        return self.at_once if self.old == "detach" else ()
