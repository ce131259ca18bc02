"""How rewards become an update: cells that override those of a preset."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator

from saccade.schema.section import Section, entries, option, section


class KLConfig(Section):
    coef: float | None = option(
        None, "Weight of the KL to the reference; 0 loads no reference.", ge=0
    )
    kind: str | None = option(
        None, "Estimator: k1 | abs | k2 | k3 | k1+ | k3+ | file.py:name.", path=True
    )
    place: Literal["loss", "reward"] | None = option(None, "Where it enters.")
    clamp: Literal["bounded", "zero"] | None = option(
        None, "Gradient of k3 where its value is clamped."
    )
    ratio_correct: bool | None = option(
        None, "In the loss: multiply by the ratio, so that its gradient is that of the old policy."
    )
    controller: Literal["fixed", "adaptive"] | None = option(
        None, "adaptive moves coef until the KL is at target."
    )
    target: float | None = option(None, "KL per token that the adaptive coef aims at.", gt=0)
    horizon: float | None = option(
        None, "Sequences over which the adaptive coef may double or halve, roughly.", gt=0
    )
    update: Literal["none", "copy", "ema"] | None = option(
        None, "What becomes of the reference: nothing, the policy, or a blend with it."
    )
    update_every: int | None = option(None, "Steps between two updates of the reference.", ge=1)
    ema: float | None = option(None, "Share of the policy in each blend.", gt=0, le=1)


class FilterConfig(Section):
    dynamic: bool | None = option(
        None, "Drop groups whose raw outcome is constant or extreme, and refill the step."
    )
    low: float | None = option(None, "Keep a group when its mean outcome is above this.")
    high: float | None = option(None, "Keep a group when its mean outcome is below this.")
    max_rounds: int | None = option(None, "Generation rounds before giving up on refilling.", ge=1)
    on_exhausted: Literal["train_partial", "skip", "stop"] | None = option(
        None, "What then happens to the step."
    )
    keep_surplus: bool | None = option(
        None, "Carry kept groups that the step has no room for to the next one."
    )
    function: str | None = option(
        None,
        "file.py:name of your own: gets the scored groups, returns those to train on.",
        path=True,
    )


class OverlongConfig(Section):
    buffer: int | None = option(
        None, "Tokens before the limit over which the penalty grows; 0 turns it off.", ge=0
    )
    factor: float | None = option(None, "Largest penalty.", ge=0)


class CorrectionConfig(Section):
    name: str = option(
        ...,
        "tis.token | tis.sequence | tis.geometric | icepop | seq_mask | seq_mask_tis | opsm | "
        "reject.token.k1 … | file.py:name.",
        path=True,
    )
    low: float | None = option(None, "Lower bound; empty: the correction's own.", ge=0)
    high: float | None = option(None, "Upper bound; empty: the correction's own.", ge=0)
    threshold: float | None = option(None, "opsm: largest mean gap of a bad sequence.", gt=0)


class FireConfig(Section):
    temperature: float | None = option(
        None, "Temperature of an episode's first token; 0 turns it off.", ge=0
    )
    top_k: int | None = option(None, "That token is one of the k likeliest; -1: any.", ge=-1)
    first_token: Literal["is", "mask"] | None = option(
        None, "Train on that token with an importance weight, or not at all."
    )
    cap: float | None = option(None, "Largest importance weight of that token.", gt=0)


class CriticConfig(Section):
    lr: float | None = option(None, "Learning rate of the critic; its schedule is train's.", gt=0)
    clip: float | None = option(None, "How far a value may move per step; 0: freely.", ge=0)
    warmup_steps: int | None = option(None, "First steps in which only the critic learns.", ge=0)
    bootstrap_truncated: bool | None = option(
        None, "Value a truncated response by the critic's estimate instead of 0 at its end."
    )
    path: str | None = option(
        None, "Model folder of the critic; empty: that of the policy.", path=True
    )


class AlgorithmConfig(Section):
    preset: str = option(
        "grpo",
        "Row of the table and add-ons, as in dapo+tis; `saccade algorithms` lists both. What "
        "follows overrides its cells.",
    )
    advantage: str | None = option(None, "Estimator, or file.py:name.", path=True)
    policy_loss: str | None = option(None, "Surrogate, or file.py:name.", path=True)
    aggregation: str | None = option(
        None, "How token losses become one number, or file.py:name.", path=True
    )
    args: dict[str, Any] = option(
        {},
        "Options of the chosen advantage, policy_loss, aggregation, kl.kind and correct by "
        "parameter name, such as {lam: 1}; docs/algorithms.md lists those of each function.",
    )
    # advantages
    std_eps: float | None = option(None, "Added to a standard deviation that divides.", ge=0)
    gamma: float | None = option(None, "Discount per sampled token.", gt=0, le=1)
    whiten: bool | None = option(None, "Whiten advantages over the tokens of the step.")
    whiten_std: bool | None = option(None, "Whitening divides by the deviation, too.")
    adv_clip: float | None = option(None, "Symmetric limit of advantages; 0: none.", ge=0)
    reward_range: tuple[float, float] | None = option(
        None, "drpo: lowest and highest possible outcome."
    )
    # policy losses
    clip: float | None = option(None, "Both clip widths of the ratio.", ge=0)
    clip_low: float | None = option(None, "Lower clip width of the ratio.", ge=0)
    clip_high: float | None = option(None, "Upper clip width of the ratio.", ge=0)
    dual_clip: float | None = option(
        None, "Bound (above 1) on the loss of negative advantages; 0: none.", ge=0
    )
    delta: float | None = option(None, "Upper bound (above 1) of the free ratio; 0: none.", ge=0)
    # entropy
    entropy_coef: float | None = option(None, "Weight of the entropy bonus.", ge=0)
    entropy_target: float | None = option(
        None, "Entropy that the bonus is steered to, a step at a time; 0: a fixed bonus.", ge=0
    )
    entropy_step: float | None = option(None, "Change of entropy_coef per step.", gt=0)
    entropy_range: tuple[float, float] | None = option(None, "Limits of a steered entropy_coef.")
    entropy_top: float | None = option(
        None,
        "Policy loss only on this share of tokens, those of highest entropy; 0: on all.",
        ge=0,
        lt=1,
    )
    entropy_scope: Literal["step", "sequence"] | None = option(
        None, "Where entropy_top takes its share."
    )
    # off-policy
    old: Literal["auto", "recompute", "rollout", "detach"] | None = option(
        None, "Old log-probs; auto: detached current ones when strictly on-policy, else recomputed."
    )
    correct: tuple[CorrectionConfig, ...] | None = option(
        None, "What mends a gap between engine and trainer; a plain name also works."
    )
    self_normalise: bool | None = option(None, "Correction weights average to 1.")
    denominator: Literal["original", "kept"] | None = option(
        None, "Divide the policy loss by all live tokens, or by those that filters kept."
    )
    # who takes part
    drop_constant: bool | None = option(None, "Leave members of constant groups out of the update.")
    exclude_status: tuple[str, ...] | None = option(
        None, "Also exclude these: truncated, overturn, void."
    )
    excluded_in_baseline: bool | None = option(
        None, "Keep members excluded by status in the group baseline."
    )
    kl: KLConfig = section(KLConfig, "Distance to the reference model.")
    filter: FilterConfig = section(FilterConfig, "Dynamic sampling.")
    overlong: OverlongConfig = section(OverlongConfig, "Soft penalty before the length limit.")
    fire: FireConfig = section(FireConfig, "A hot first token, for variety.")
    critic: CriticConfig = section(CriticConfig, "The value model of gae.")

    @field_validator("correct", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        return value if value is None else entries(value, "name")
