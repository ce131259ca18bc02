"""All options: type, default, and one line that says what it does.

Single values are checked here, combinations of options in `saccade.checks`; reading and writing is in
`saccade.config`. One file for each part of a run; `Config` puts them together.

    >>> dict(options())["train.lr"].description
    'Peak learning rate; sft 5e-6, dpo 1e-5, reward-model 9e-6 (process 1e-6).'
"""

# ruff: noqa: F403, F405 (every section can be imported from here)
from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import model_validator

from saccade.config.schema.algorithm import *
from saccade.config.schema.data import *
from saccade.config.schema.reward import *
from saccade.config.schema.rollout import *
from saccade.config.schema.run_options import *
from saccade.config.schema.section import ANSWERING, SCORING, TRAINING, Section, extra, section
from saccade.config.schema.train import *


class Config(Section):
    run: RunConfig = section(RunConfig, "Name, folder, seed, length and resume.")
    model: ModelConfig = section(ModelConfig, "Which model, and what of it is trained.")
    data: DataConfig = section(DataConfig, "Training and validation sets and their hygiene.")
    prompt: PromptConfig = section(PromptConfig, "How a row becomes a conversation.")
    rollout: RolloutConfig = section(RolloutConfig, "Engine and sampling.", commands=ANSWERING)
    env: EnvConfig = section(EnvConfig, "What the policy talks to.")
    reward: RewardConfig = section(RewardConfig, "What a response is worth.", commands=SCORING)
    algorithm: AlgorithmConfig = section(AlgorithmConfig, "How rewards become an update.", commands=("rl",))
    train: TrainConfig = section(TrainConfig, "Batch arithmetic and optimizer.", commands=TRAINING)
    sft: SftConfig = section(SftConfig, "Supervised fine-tuning only.", commands=("sft",))
    dpo: DpoConfig = section(DpoConfig, "Preference training only.", commands=("dpo",))
    reward_model: RewardModelConfig = section(
        RewardModelConfig, "Reward models only.", commands=("reward-model", "eval")
    )
    val: ValConfig = section(ValConfig, "Validation during training, and eval.")
    eval: EvalConfig = section(EvalConfig, "What eval measures on besides data.val.", commands=("eval",))
    generate: GenerateConfig = section(GenerateConfig, "Batch inference only.", commands=("generate",))
    save: SaveConfig = section(SaveConfig, "Checkpoints.", commands=TRAINING)
    track: TrackConfig = section(TrackConfig, "Loggers and stored rollouts.", commands=TRAINING)

    @model_validator(mode="after")
    def _derived(self) -> Config:
        if "max_tokens" not in self.val.model_fields_set:
            self.val.__dict__["max_tokens"] = self.rollout.max_tokens
        return self


@cache
def options(kind: type[Section] = Config, prefix: str = "", *, keys: bool = True) -> tuple[tuple[str, Any], ...]:
    """(dotted name, field) of every option, in order. Without `keys` a mapping is one option, else one per key."""
    found: list[tuple[str, Any]] = []
    for name, info in kind.model_fields.items():
        annotation = info.annotation
        opened = keys or "mapping" not in extra(info)
        if opened and isinstance(annotation, type) and issubclass(annotation, Section):
            found += options(annotation, f"{prefix}{name}.", keys=keys)
        else:
            found.append((f"{prefix}{name}", info))
    return tuple(found)
