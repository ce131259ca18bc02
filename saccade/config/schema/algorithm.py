"""Options of the algorithm: how rewards become an update."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, field_validator, model_validator

from saccade.config.schema.section import Arguments, Section, When, option, section

REFERENCE = When("algorithm.kl.coef > 0", "algorithm.kl.coef=0.01")
KL_IN_LOSS = When("algorithm.kl_in_loss", "algorithm.kl.coef=0.01 algorithm.kl.place=loss", "a KL in the loss")
ADAPTIVE = When("algorithm.kl.controller == 'adaptive'", "algorithm.kl.controller=adaptive")
MOVING = When("algorithm.kl.update != 'none'", "algorithm.kl.update=copy")
BLENDED = When("algorithm.kl.update == 'ema'", "algorithm.kl.update=ema")
DYNAMIC = When("algorithm.filter.dynamic", "algorithm.filter.dynamic=true")
OVERLONG = When("algorithm.overlong.buffer > 0", "algorithm.overlong.buffer=512")
HOT = When("algorithm.hot_first_token.temperature > 0", "algorithm.hot_first_token.temperature=10")
TRAINED = When("algorithm.hot_first_token.first_token == 'is'", "algorithm.hot_first_token.first_token=is")
CRITIC = When("algorithm.needs_critic", "algorithm.advantage=gae", "an advantage with a critic")
GROUPS = When("algorithm.estimator.group", "algorithm.advantage=grpo train.samples_per_prompt=8", "group advantages")
EXCLUDING = When("algorithm.exclude_status", "algorithm.exclude_status=[overturn]")
STEERED = When("algorithm.entropy_target > 0", "algorithm.entropy_target=0.2")
TOP_ONLY = When("algorithm.entropy_top > 0", "algorithm.entropy_top=0.2")
WEIGHING = When("any(c.weighs for c in algorithm.corrections)", "algorithm.correct=[tis.token]", "correction weights")
DROPPING = When("algorithm.entropy_top > 0 or algorithm.at_once", "algorithm.entropy_top=0.2", "a filter of tokens")


class KLConfig(Section):
    coef: float = option(0.0, "Weight of the KL to the reference; 0 loads no reference.", ge=0)
    kind: str = option(
        "k3", "k1 | abs | k2 | k3 | k1+ | k3+ | file.py:name; in the reward k1 unless set.", path=True, when=REFERENCE
    )
    place: Literal["loss", "reward"] = option("loss", "Where it enters.", when=REFERENCE)
    ratio_correct: bool = option(False, "In the loss: times the ratio, for the old policy's gradient.", when=KL_IN_LOSS)
    controller: Literal["fixed", "adaptive"] = option("fixed", "adaptive: coef moves the KL to target.", when=REFERENCE)
    target: float = option(0.1, "KL per token that the adaptive coef aims at.", gt=0, when=(REFERENCE, ADAPTIVE))
    horizon: float = option(10_000, "Sequences in which coef may double or halve.", gt=0, when=(REFERENCE, ADAPTIVE))
    update: Literal["none", "copy", "ema"] = option(
        "none", "What becomes of the reference: nothing, the policy, or a blend with it.", when=REFERENCE
    )
    update_every: int = option(512, "Steps between two updates of the reference.", ge=1, when=(REFERENCE, MOVING))
    ema: float = option(0.6, "Share of the policy in each blend.", gt=0, le=1, when=(REFERENCE, BLENDED))

    @model_validator(mode="after")
    def _usual_kind(self) -> KLConfig:
        if "kind" not in self.model_fields_set:
            self.__dict__["kind"] = {"loss": "k3", "reward": "k1"}[self.place]
        return self


class FilterConfig(Section):
    dynamic: bool = option(False, "Drop groups whose raw outcome is constant or extreme, and refill the step.")
    low: float = option(0.01, "Keep a group when its mean outcome is above this.", when=DYNAMIC, allow_inf_nan=True)
    high: float = option(0.99, "Keep a group when its mean outcome is below this.", when=DYNAMIC, allow_inf_nan=True)
    max_rounds: int = option(10, "Generation rounds before giving up on refilling.", ge=1, when=DYNAMIC)
    on_exhausted: Literal["train_partial", "skip", "stop"] = option(
        "train_partial", "Then train on the groups there are, skip the step, or stop.", when=DYNAMIC
    )
    keep_surplus: bool = option(False, "Carry kept groups that the step has no room for to the next one.", when=DYNAMIC)
    function: str | None = option(None, "file.py:name; takes the scored groups, returns those to train on.", path=True)


class OverlongConfig(Section):
    buffer: int = option(0, "Tokens before the limit over which the penalty grows; 0 turns it off.", ge=0)
    factor: float = option(1.0, "Largest penalty.", ge=0, when=OVERLONG)


class CorrectionConfig(Section):
    model_config = ConfigDict(extra="allow")  # options of the function

    name: str = option(
        ...,
        "tis.token | tis.sequence | tis.geometric | icepop | seq_mask | seq_mask_tis | opsm | recent | "
        "reject.token.k1 … | file.py:name; its options beside it: {name: icepop, low: 0.5, high: 5}.",
        path=True,
    )


class HotFirstTokenConfig(Section):
    temperature: float = option(0.0, "Temperature of an episode's first token; 0 turns it off.", ge=0)
    top_k: int = option(-1, "That token is one of the k likeliest; -1: any.", ge=-1, when=HOT)
    first_token: Literal["is", "mask"] = option("is", "Train it with an importance weight, or not.", when=HOT)
    cap: float = option(2.0, "Largest importance weight of that token.", gt=0, when=(HOT, TRAINED))


class CriticConfig(Section):
    lr: float = option(9e-6, "Learning rate of the critic; its schedule is train's.", gt=0, when=CRITIC)
    clip: float = option(0.2, "How far a value may move per step; 0: freely.", ge=0, when=CRITIC)
    warmup_steps: int = option(0, "First steps in which only the critic learns.", ge=0, when=CRITIC)
    bootstrap_truncated: bool = option(False, "A truncated response ends with the critic's value, not 0.", when=CRITIC)
    path: str | None = option(None, "Model folder of the critic; empty: that of the policy.", path=True, when=CRITIC)


class AlgorithmConfig(Section):
    preset: tuple[str, ...] = option(
        ("grpo",), "A preset and add-ons, as in [dapo, tis]; `saccade algorithms` lists both; options override them."
    )
    advantage: str = option("grpo", "Estimator, or file.py:name.", path=True)
    policy_loss: str = option("clip", "Surrogate, or file.py:name.", path=True)
    aggregation: str = option("token_mean", "How token losses become one number, or file.py:name.", path=True)
    args: Arguments = option(
        {},
        "Options of the chosen functions by parameter name, such as {clip_high: 0.28, gamma: 0.99}; docs/algorithms.md "
        "lists them. `clip` is clip_low and clip_high.",
    )
    adv_clip: float = option(0.0, "Symmetric limit of advantages; 0: none.", ge=0)
    # entropy
    entropy_coef: float = option(0.0, "Weight of the entropy bonus.", ge=0)
    entropy_target: float = option(0.0, "Entropy that the bonus is steered to; 0: a fixed bonus.", ge=0)
    entropy_step: float = option(1e-3, "Change of entropy_coef per step.", gt=0, when=STEERED)
    entropy_range: tuple[float, float] = option((0.0, 0.05), "Limits of a steered entropy_coef.", when=STEERED)
    entropy_top: float = option(0.0, "Share of tokens, of highest entropy, in the policy loss; 0: all.", ge=0, lt=1)
    entropy_scope: Literal["step", "sequence"] = option("step", "Where entropy_top takes its share.", when=TOP_ONLY)
    # off-policy
    old: Literal["auto", "recompute", "rollout", "detach"] = option(
        "auto", "Old log-probs; auto: detached current ones when strictly on-policy, else recomputed."
    )
    correct: tuple[CorrectionConfig, ...] = option((), "Corrections of the engine/trainer log-prob gap (name or list).")
    self_normalise: bool = option(False, "Correction weights average to 1.", when=WEIGHING)
    denominator: Literal["original", "kept"] = option(
        "original", "Divide the policy loss by all live tokens, or by those that filters kept.", when=DROPPING
    )
    # which members are trained
    drop_constant: bool = option(False, "Leave members of constant groups out of the update.", when=GROUPS)
    exclude_status: tuple[str, ...] = option((), "Also exclude these: truncated, overturn, void.")
    excluded_in_baseline: bool = option(False, "Excluded members stay in the baseline.", when=(GROUPS, EXCLUDING))
    kl: KLConfig = section(KLConfig, "Distance to the reference model.")
    filter: FilterConfig = section(FilterConfig, "Dynamic sampling.")
    overlong: OverlongConfig = section(OverlongConfig, "Soft penalty before the length limit.")
    hot_first_token: HotFirstTokenConfig = section(HotFirstTokenConfig, "A hot first token, for variety.")
    critic: CriticConfig = section(CriticConfig, "The value model of gae.")

    @field_validator("args")
    @classmethod
    def _both_widths(cls, args: dict[str, Any]) -> dict[str, Any]:
        both = dict.fromkeys(("clip_low", "clip_high"), args["clip"]) if "clip" in args else {}
        return both | {name: value for name, value in args.items() if name != "clip"}
